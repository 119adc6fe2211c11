#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: programs built against the last release run with this library.

tests/abi/libmoeblas.abi describes the interface of the last release, written by libabigail's abidw (`--write`, once a
release). Fields may be appended to structs that start with their size, functions and enumerators may come; nothing may move,
change or go. The comparison needs abidiff (Debian: abigail-tools); where it is not installed only the functions are compared,
and that is said. `--self-test` shows that each kind of break is found."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import gate

BASELINE = Path("tests/abi/libmoeblas.abi")
DESCRIBE = ["abidw", "--headers-dir", "include", "--drop-private-types", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs",
            "--type-id-style", "hash"]
BREAKS = re.compile(r"offset changed|type changed|(?:was|were) (?:added|removed)$|return type|from value '|enumerator deletion|"
                    r"data member deletion|^ *\[D\]|type of .* changed|name changed|became|SONAME changed")


def functions_of(description: str) -> set[str]:
    """The functions that a description exports."""
    return set(re.findall(r"<elf-symbol name='(\w+)'[^>]*type='func-type'", description))


def breaks(report: str) -> list[str]:
    """The lines of a report of abidiff that tell of a break."""
    return [line.strip() for line in report.splitlines() if BREAKS.search(line)]


def exported(library: Path) -> set[str]:
    """The functions that a library exports."""
    answer = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    return set(re.findall(r" T (\w+)", answer.stdout))


def describe(library: Path, out: Path) -> None:
    subprocess.run([*DESCRIBE, "--out-file", str(out), str(library)], check=True)


def check(library: Path) -> list[str]:
    """What programs of the last release would miss or misread."""
    gone = functions_of(BASELINE.read_text(encoding="utf-8")) - exported(library)
    found = [f"{name}: in the last release, but not exported" for name in sorted(gone)]
    if not (shutil.which("abidiff") and shutil.which("abidw")):
        print("structs and enums are not compared: there is no abidiff (Debian: abigail-tools)")
        return found
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.abi"
        describe(library, now)
        report = subprocess.run(["abidiff", "--harmless", str(BASELINE), str(now)], capture_output=True, text=True, check=False)
        if report.returncode & 3:
            found.append(f"abidiff failed: {report.stderr.strip()}")
        if report.stdout:
            print(report.stdout)
        return found + breaks(report.stdout)


def self_test() -> bool:
    """What abidiff says of each kind of change, shortened."""
    harmless = ("Functions changes summary: 0 Removed, 1 Changed, 1 Added function\n"
                "          type size changed from 1344 to 1408 (in bits)\n            1 data member insertion:\n"
                "              'void* later', at offset 1344 (in bits)\n  [A] 'function int moe_new()'\n"
                "          1 enumerator insertion:\n            'moe_dtype::MOE_FP8' value '4'\n")
    harmful = ["  [D] 'function int moe_old()'", "   'void* x' offset changed from 128 to 192 (in bits) (by +64 bits)",
               "   'moe_dtype::MOE_FP16' from value '3' to '4'", "    parameter 3 of type 'int' was added",
               "   type of 'int64_t tokens' changed:", "    return type changed:", "   1 data member deletion:",
               "    1 enumerator deletion:", "SONAME changed from 'libmoeblas.so.0' to 'libmoeblas.so.1'"]
    symbols = "<elf-symbol name='moe_a' type='func-type'/><elf-symbol name='moe_b' version='V' type='func-type'/>"
    return (not breaks(harmless) and all(len(breaks(harmless + line + "\n")) == 1 for line in harmful)
            and functions_of(symbols) == {"moe_a", "moe_b"} and len(functions_of(BASELINE.read_text(encoding="utf-8"))) > 50)


def gate_check() -> list[str]:
    library = Path(os.environ.get("BUILD", "build")) / "libmoeblas.so"
    if sys.argv[1:] == ["--write"]:
        describe(library, BASELINE)
        return []
    return check(library) if library.exists() else [f"no library in {library.parent}"]


if __name__ == "__main__":
    gate.run(self_test, gate_check)
