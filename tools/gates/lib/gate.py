# SPDX-License-Identifier: Apache-2.0
"""What the gates in Python share: how one starts and ends, which files it reads, how long a function may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterable


def run(self_test: Callable[[], bool], check: Callable[[], Iterable[str]]) -> None:
    """Runs a gate in the root: what `check` finds is printed, a sentence a line, and counted; nothing found is a pass."""
    os.chdir(Path(__file__).resolve().parents[3])
    if sys.argv[1:] == ["--self-test"]:
        found = [] if self_test() else ["the self-test"]
    else:
        found = list(check())
    for sentence in found:
        print(sentence)
    print(f"{0 if found else 1} passed, {len(found)} failed")
    sys.exit(1 if found else 0)


def read_files(*patterns: str) -> dict[str, str]:
    """Path and text of the project's files of these patterns, ignored ones left out."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    paths = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()
    return {path: Path(path).read_text(encoding="utf-8") for path in paths if os.path.isfile(path)}


def too_long(lengths: list[tuple[int, str]]) -> list[str]:
    """What is wrong with functions of these (lines, name)."""
    found = [f"{where}: {length} lines, the limit is 120" for length, where in lengths if length > 120]
    long = sum(length >= 60 for length, _ in lengths)
    if long > 0.1 * len(lengths):
        found.append(f"{long} of {len(lengths)} functions have 60 lines or more, the limit is one in ten")
    return found
