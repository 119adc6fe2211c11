#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs `moeblas bench` several times over and says how far its medians spread, and, given a second tool, what became slower.

    tools/rounds.py build/moeblas -- --threads 2 @tests/problems/bench.txt                 the spread of 5 rounds
    tools/rounds.py build/moeblas --before OLD/moeblas -- @tests/problems/bench.txt        the same, and a comparison

A round is a run of the tool; rounds of two tools alternate, as machines drift. What follows `--` goes to `moeblas bench`.
A shape is a problem and a pass. Its time is the median over the rounds, its spread the largest less the smallest of them,
over the median. Ends with status 1 where a shape is slower than before by more than --slower per cent."""
from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections import defaultdict
from statistics import median
from typing import Iterable

Shape = tuple[str, str]  # problem, pass
Table = dict[Shape, list[float]]  # microseconds, a round each


def spread(times: list[float]) -> float:
    """Per cent of the median."""
    return 100 * (max(times) - min(times)) / median(times)


def read_times(lines: Iterable[str]) -> dict[Shape, float]:
    """The times of the layer as a whole, from the lines that `moeblas bench --csv` prints."""
    return {(row["problem"], row["pass"]): float(row["time_us"]) for row in csv.DictReader(lines)
            if row["impl"] == "moeblas" and row["time_us"]}


def one_round(tool: str, arguments: list[str]) -> dict[Shape, float]:
    """Runs the tool once; what it says on stderr is left to be read."""
    done = subprocess.run([tool, "bench", "--csv", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    times = read_times(done.stdout.splitlines())
    if done.returncode != 0 or not times:
        raise SystemExit(f"rounds: {tool} bench ended with status {done.returncode} and {len(times)} times, wanted 0 and some")
    return times


def run_rounds(tools: list[str], count: int, arguments: list[str]) -> list[Table]:
    """A table a tool."""
    tables: list[Table] = [defaultdict(list) for _ in tools]
    for _ in range(count):
        for tool, table in zip(tools, tables):
            for shape, time in one_round(tool, arguments).items():
                table[shape].append(time)
    return tables


def spread_line(table: Table) -> str:
    spreads = [spread(times) for times in table.values()]
    return (f"spread of {len(next(iter(table.values())))} rounds: median {median(spreads):.1f} %, at most "
            f"{max(spreads):.1f} %, above 1 % in {sum(value > 1 for value in spreads)} of {len(spreads)} shapes")


def report(now: Table, before: Table | None, limit: float) -> list[Shape]:
    """Prints a line a shape and the sums; returns the shapes that are slower."""
    slower = []
    for shape, times in now.items():
        line = f"{median(times):12.1f} us  spread {spread(times):5.1f} %  {shape[1]}  {shape[0]}"
        if before is not None and shape in before:
            change = 100 * (median(times) / median(before[shape]) - 1)
            line = f"{change:+7.1f} %{line}"
            slower += [shape] if change > limit else []
        print(line)
    print(spread_line(now))
    if before is not None:
        common = sum(shape in before for shape in now)
        print(f"slower than before by more than {limit:g} %: {len(slower)} of {common} shapes")
    return slower


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tool", help="the moeblas to time")
    parser.add_argument("--before", help="the moeblas of the last release")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slower", type=float, default=3, help="per cent")
    parser.add_argument("arguments", nargs="+", help="of moeblas bench, after --")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: wanted at least 2")
    tools = [options.tool] + ([options.before] if options.before else [])
    tables = run_rounds(tools, options.rounds, options.arguments)
    return 1 if report(tables[0], tables[1] if options.before else None, options.slower) else 0


if __name__ == "__main__":
    sys.exit(main())
