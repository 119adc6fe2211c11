# SPDX-License-Identifier: Apache-2.0
"""The pictures of the README: read from tables as they are, the same file from the same table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import plot

TABLE = """problem,pass,impl,time_us,tflops,note
ceiling,,dense,,800.0,before
t8 bf16 swiglu given,fwd,moeblas,100.0,500.0,
t8 bf16 swiglu bwd given,bwd,moeblas,200.0,400.0,
t8 bf16 swiglu given,fwd,up,60.0,600.0,
t8 bf16 swiglu given,,liger,,,not run: absent
"""


def test_tables_are_read_as_they_are(tmp_path: Path) -> None:
    """Old and new forms of a problem are one; rows without a time are counted."""
    (tmp_path / "a.csv").write_text(TABLE)
    results = plot.read([tmp_path / "a.csv"])
    assert results.problems == ["t8 bf16 swiglu given"]
    assert results.dense == [800.0]
    assert results.without_time == 1
    assert plot.shares(results, "fwd") == {"up": [60.0]}
    assert plot.losses(results, {}) == []
    results.tflops[("t8 bf16 swiglu given", "bwd", "liger")] = 500.0
    assert plot.losses(results, {})[0].split()[:3] == ["0.80", "bwd", "t8"]
    assert results.tflops[("t8 bf16 swiglu given", "bwd", "moeblas")] == 400.0


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    """Its name and the missing columns are in the sentence."""
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="a.csv: wants the columns"):
        plot.read([tmp_path / "a.csv"])


def test_the_committed_table_makes_small_equal_pictures(tmp_path: Path, monkeypatch) -> None:
    """Both pictures, twice, byte by byte the same, at most 100 kB each."""
    pictures = []
    for folder in ("one", "two"):
        arguments = [
            "plot.py",
            str(ROOT / "bench/results/h200.csv"),
            "--out",
            str(tmp_path / folder),
        ]
        monkeypatch.setattr(sys, "argv", arguments)
        assert plot.main() == 0
        pictures.append([(tmp_path / folder / n).read_bytes() for n in ("speed.svg", "ops.svg")])
    assert pictures[0] == pictures[1]
    assert all(1000 < len(picture) <= 100_000 for picture in pictures[0])
