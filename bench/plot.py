# SPDX-License-Identifier: Apache-2.0
"""Draws the two pictures of the README from tables of `moeblas bench` and bench/peers/run.py:

    python3 bench/plot.py bench/results/h200.csv bench/results/h200_peers.csv --out docs/pictures

speed.svg: TFLOP/s of the whole layer by shape, forward and backward, moeblas beside the peers.
ops.svg: where the time of moeblas goes, op by op, in per cent of the layer. Less than 100 is time
that no op alone accounts for; more, ops that are slower alone than inside the layer. Rows are
taken as they stand; only rows without a time are left out, and counted on stderr. On stdout stands
how moeblas compares with the best peer of each row, where it loses first.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "moeblas"  # the same table gives the same file
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, a third of the size
matplotlib.rcParams["font.family"] = "sans-serif"

import matplotlib.pyplot as plt

PASSES = {"fwd": "forward", "bwd": "backward"}
LAYERS = {"moeblas", "moeblas-graph"}
# Peers that are whole layers, in the order and colours of the legend; ours first.
COLOURS = {
    "moeblas": "#0b3d91",
    "moeblas-graph": "#5b8def",
    "sonicmoe": "#d1495b",
    "torch-compile-gather": "#edae49",
    "torch-compile-add": "#c98a1b",
    "torch-gather": "#f5d491",
    "torch-add": "#e2c275",
    "liger": "#66a182",
    "scattermoe": "#8d6a9f",
    "transformers-eager": "#9a9a9a",
}
OPS = {
    "fwd": ("router", "route", "sort", "up", "down", "combine"),
    "bwd": ("dact", "dw2", "dw1", "db1", "dx rows", "combine dx", "route bwd"),
}


@dataclass
class Results:
    """Times and rates by problem, pass and implementation, and the dense ceilings by table."""

    us: dict[tuple[str, str, str], float] = field(default_factory=dict)
    tflops: dict[tuple[str, str, str], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    without_time: int = 0

    def add(self, row: dict[str, str]) -> None:
        """One row of a table; a later row of the same thing replaces the earlier one."""
        if row["problem"] == "ceiling":
            if row["tflops"]:
                self.dense.append(float(row["tflops"]))
            return
        problem = " ".join(word for word in row["problem"].split() if word != "bwd")
        if not row["time_us"]:
            self.without_time += 1
            return
        key = (problem, row["pass"], row["impl"])
        self.us[key] = float(row["time_us"])
        self.tflops[key] = float(row["tflops"])
        if problem not in self.problems:
            self.problems.append(problem)


def read(paths: list[Path]) -> Results:
    """All tables together. Raises ValueError for a file that is no such table."""
    results = Results()
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            wanted = {"problem", "pass", "impl", "time_us", "tflops"}
            if not wanted <= set(reader.fieldnames or ()):
                raise ValueError(f"{path}: wants the columns {', '.join(sorted(wanted))}")
            for row in reader:
                results.add(row)
    return results


def read_names(path: Path) -> dict[str, str]:
    """Names of problems from the comments of a list: canonical text -> name."""
    names = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text, _, name = line.partition("#")
        if text.strip() and name.strip():
            names[" ".join(word for word in text.split() if word != "bwd")] = name.strip()
    return names


def label(problem: str, names: dict[str, str]) -> str:
    """What stands under a group of bars."""
    return names.get(problem, problem.replace(" bf16 swiglu given", ""))


def draw_speed(results: Results, names: dict[str, str], path: Path) -> None:
    """Grouped bars, one group a shape, one panel a pass, and the dense product as a line."""
    measured = {impl for _, _, impl in results.tflops}
    impls = [impl for impl in COLOURS if impl in measured]
    count = len(results.problems)
    figure, panels = plt.subplots(2, 1, figsize=(11, 6.2), sharex=True, layout="constrained")
    for panel, (passes, title) in zip(panels, PASSES.items(), strict=True):
        width = 0.84 / len(impls)
        for i, impl in enumerate(impls):
            at = [k - 0.42 + (i + 0.5) * width for k in range(count)]
            values = [results.tflops.get((p, passes, impl), 0.0) for p in results.problems]
            panel.bar(at, values, width, color=COLOURS[impl], label=impl)
        if results.dense:
            panel.axhline(max(results.dense), color="black", linewidth=0.8, linestyle=":")
            panel.text(
                count - 0.5,
                max(results.dense),
                "dense product",
                ha="right",
                va="bottom",
                fontsize=8,
            )
        panel.set_ylabel(f"{title}, TFLOP/s")
        panel.set_xlim(-0.6, count - 0.4)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(ncols=5, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.02))
    panels[1].set_xticks(range(count), [label(p, names) for p in results.problems])
    panels[1].tick_params(axis="x", rotation=25, labelsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def shares(results: Results, passes: str) -> dict[str, list[float]]:
    """Per cent of the layer's time by op, one value a problem; 0 where there is no time."""
    columns = defaultdict(list)
    for problem in results.problems:
        whole = results.us.get((problem, passes, "moeblas"))
        for op in OPS[passes]:
            alone = results.us.get((problem, passes, op), 0.0)
            columns[op].append(100 * alone / whole if whole else 0.0)
    return {op: values for op, values in columns.items() if any(values)}


def draw_ops(results: Results, names: dict[str, str], path: Path) -> None:
    """Stacked bars, one a shape, one panel a pass; ops alone may add up to more than the layer."""
    colours = plt.get_cmap("tab10")
    count = len(results.problems)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for panel, (passes, title) in zip(panels, PASSES.items(), strict=True):
        left = [0.0] * count
        for i, (op, values) in enumerate(shares(results, passes).items()):
            panel.barh(range(count), values, left=left, height=0.7, color=colours(i), label=op)
            left = [a + b for a, b in zip(left, values, strict=True)]
        panel.axvline(100, color="black", linewidth=0.8, linestyle=":")
        panel.set_xlabel(f"{title}: each op alone, % of the time of the layer")
        panel.set_yticks(range(count), [label(p, names) for p in results.problems], fontsize=8)
        panel.legend(ncols=6, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def losses(results: Results, names: dict[str, str]) -> list[str]:
    """A line for each problem and pass that a peer was timed on too, the farthest behind first."""
    rows = []
    for problem in results.problems:
        for passes in PASSES:
            rates = {i: results.tflops.get((problem, passes, i), 0.0) for i in COLOURS}
            peer = max((i for i in rates if i not in LAYERS), key=lambda i: rates[i])
            ours = rates["moeblas"]
            if ours and rates[peer]:
                text = (
                    f"{passes} {label(problem, names):22s} {ours:6.0f} of {rates[peer]:6.0f} {peer}"
                )
                rows.append((ours / rates[peer], text))
    return [f"{ratio:5.2f}  {text}" for ratio, text in sorted(rows)]


def main() -> int:
    """The command."""
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=root / "docs" / "pictures")
    parser.add_argument("--list", type=Path, default=root / "tests/problems/bench_cuda.txt")
    options = parser.parse_args()
    try:
        results, names = read(options.tables), read_names(options.list)
    except (OSError, ValueError) as why:
        print(f"plot.py: {why}", file=sys.stderr)
        return 2
    if not any(impl in LAYERS for _, _, impl in results.us):
        print(f"plot.py: no row of {' '.join(sorted(LAYERS))} with a time", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for draw, name in ((draw_speed, "speed.svg"), (draw_ops, "ops.svg")):
        draw(results, names, options.out / name)
        print(options.out / name)
    for line in losses(results, names):
        print(line)
    if results.without_time:
        print(f"plot.py: {results.without_time} rows without a time", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
