# SPDX-License-Identifier: Apache-2.0
"""Writes the csv of a run and draws the loss curves of several, one panel a model."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from .loop import Record

FIELDS = ("model", "run", "step", "loss", "time_ms")


def write_csv(path: Path, model: str, run: str, record: Record) -> None:
    """Appends a run to ``path``: one row a step, with a header in a new file."""
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for step, (loss, ms) in enumerate(zip(record.losses, record.times_ms, strict=True)):
            writer.writerow((model, run, step, f"{loss:.6f}", f"{ms:.3f}"))


def read_runs(paths: list[Path]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """model -> run -> [(step, loss)] of all files."""
    runs: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != FIELDS:
                raise ValueError(f"{path}: columns {reader.fieldnames}, wanted {list(FIELDS)}")
            for row in reader:
                runs[row["model"]][row["run"]].append((int(row["step"]), float(row["loss"])))
    return runs


def draw(paths: list[Path], out: Path) -> None:
    """Draws the loss of every run over its steps into ``out`` (png, svg or pdf by its name)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = read_runs(paths)
    if not runs:
        raise ValueError(f"{', '.join(map(str, paths))}: no rows, wanted at least one run")
    figure, axes = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 3.6), squeeze=False)
    for axis, (model, curves) in zip(axes[0], sorted(runs.items()), strict=True):
        for index, (run, points) in enumerate(sorted(curves.items())):
            points = sorted(points)
            steps, losses = [step for step, _ in points], [loss for _, loss in points]
            axis.plot(steps, losses, ("-", "--", ":", "-.")[index % 4], linewidth=1.2, label=run)
        axis.set(title=model, xlabel="step", ylabel="loss (nats a token)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=150)
