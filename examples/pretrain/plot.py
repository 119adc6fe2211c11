# SPDX-License-Identifier: Apache-2.0
"""Writes the csv of a run; compares several: loss curves, one panel a model, and a table."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from .loop import Record, median_step_ms

FIELDS = ("model", "run", "step", "loss", "time_ms")
TAIL = 50  # steps at the end that the table takes the loss from


def write_csv(path: Path, model: str, run: str, record: Record) -> None:
    """Appends a run to ``path``: one row a step, with a header in a new file."""
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for step, (loss, ms) in enumerate(zip(record.losses, record.times_ms, strict=True)):
            writer.writerow((model, run, step, f"{loss:.6f}", f"{ms:.3f}"))


def read_runs(paths: list[Path]) -> dict[str, dict[str, Record]]:
    """model -> run -> what was recorded (but for memory), of all files.

    Raises ValueError for other columns, and for a run whose steps are not 0, 1, 2, ...: two runs of
    one name, or a file that was cut.
    """
    runs: dict[str, dict[str, Record]] = defaultdict(dict)
    for path in paths:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != FIELDS:
                raise ValueError(f"{path}: columns {reader.fieldnames}, wanted {list(FIELDS)}")
            for row in reader:
                record = runs[row["model"]].setdefault(row["run"], Record([], [], 0))
                if int(row["step"]) != len(record.losses):
                    raise ValueError(
                        f"{path}: step {row['step']} of {row['model']} {row['run']}, "
                        f"wanted {len(record.losses)}"
                    )
                record.losses.append(float(row["loss"]))
                record.times_ms.append(float(row["time_ms"]))
    if not runs:
        raise ValueError(f"{', '.join(map(str, paths))}: no rows, wanted at least one run")
    return runs


def table(runs: dict[str, dict[str, Record]]) -> str:
    """A line a run: median step, mean loss at the end, mean distance to the model's first run."""
    lines = [f"{'model':<12} {'run':<24} {'steps':>6} {'step ms':>9} {'loss':>8} {'distance':>9}"]
    for model, curves in sorted(runs.items()):
        first = next(iter(curves.values())).losses
        for run, record in curves.items():
            pairs = list(zip(record.losses, first, strict=False))  # over the steps that both have
            distance = sum(abs(loss - other) for loss, other in pairs) / len(pairs)
            loss = statistics.mean(record.losses[-TAIL:])
            ms = median_step_ms(record.times_ms)
            lines.append(
                f"{model:<12} {run:<24} {len(record.losses):>6} {ms:>9.2f} {loss:>8.4f} "
                f"{distance:>9.4f}"
            )
    return "\n".join(lines)


def draw(runs: dict[str, dict[str, Record]], out: Path) -> None:
    """Draws the loss of every run over its steps into ``out`` (png, svg or pdf by its name)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 3.6), squeeze=False)
    for axis, (model, curves) in zip(axes[0], sorted(runs.items()), strict=True):
        for index, (run, record) in enumerate(curves.items()):
            axis.plot(record.losses, ("-", "--", ":", "-.")[index % 4], linewidth=1.2, label=run)
        axis.set(title=model, xlabel="step", ylabel="loss (nats a token)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=150)
