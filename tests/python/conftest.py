# SPDX-License-Identifier: Apache-2.0
"""Lets the tests import the package of this tree with the library of this build.

Environment: BUILD (default build) or MOEBLAS_LIBRARY. The last line of a run is the sum that
tests/run.sh reads.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault(
    "MOEBLAS_LIBRARY",
    str((ROOT / os.environ.get("BUILD", "build") / "libmoeblas.so").resolve()),
)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_unconfigure(config) -> None:
    """Prints "N passed, N failed" and, before it, the reason of each skipped test or module."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    stats = reporter.stats
    for reason, count in Counter(report.longrepr[2] for report in stats.get("skipped", [])).items():
        print(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    print(f"{len(stats.get('passed', []))} passed, {failed} failed")
