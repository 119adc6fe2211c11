#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: how much of the C code of the host the tests reach, as bench/results/coverage.csv has it.

`make coverage` builds with gcov's counters, runs the suite and calls `--measure`, which writes the table and prints what is
missed. That takes too long for every change: without arguments the gate asks whether the table is of this code (few files
that it does not know, none that is gone) and whether its figures reach the floors below. `--self-test` shows that it can
fail."""
from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Iterable, NamedTuple

from lib import gate

RESULTS = Path("bench/results/coverage.csv")
LINES = 98.0  # per cent of the lines of src/*.c, src/cpu and tools
BRANCHES = 92.0
# What reads arguments, and files that strangers may have made: all of it is reached, without an exception.
PARSERS = ("tools/cli.c", "tools/presets.c", "tools/problem.c", "tools/problem_fields.c", "tools/problem_list.c",
           "tools/train/checkpoint.c", "tools/train/safetensors.c", "tools/train/settings.c", "tools/train/state.c",
           "tools/train/text.c")
STALE = 0.1  # share of the files that may be unknown to the table


class Count(NamedTuple):
    """What there is in a file, and what of it was reached."""

    lines: int
    lines_hit: int
    branches: int
    branches_hit: int


def merge(reports: Iterable[dict]) -> dict[str, tuple[dict[int, int], dict[tuple[int, int], int]]]:
    """File -> (line -> times, (line, branch) -> times), summed over the objects that a file is compiled into. A
    test that includes a source counts for it; what headers become in a test is the test's."""
    files: dict[str, tuple[dict[int, int], dict[tuple[int, int], int]]] = {}
    for report in reports:
        for part in report["files"]:
            if "/obj/tests/" in report.get("data_file", "") and not part["file"].endswith(".c"):
                continue
            lines, branches = files.setdefault(os.path.normpath(part["file"]), ({}, {}))
            for line in part["lines"]:
                number = line["line_number"]
                lines[number] = lines.get(number, 0) + line["count"]
                for i, branch in enumerate(line["branches"]):
                    branches[number, i] = branches.get((number, i), 0) + branch["count"]
    return files


def count(lines: dict[int, int], branches: dict[tuple[int, int], int]) -> Count:
    """The figures of one file."""
    return Count(len(lines), sum(n > 0 for n in lines.values()), len(branches), sum(n > 0 for n in branches.values()))


def total(counts: Iterable[Count]) -> Count:
    """The sum over files."""
    return Count(*(sum(column) for column in zip(Count(0, 0, 0, 0), *counts)))


def percent(hit: int, there: int) -> float:
    return 100.0 * hit / there if there else 100.0


def is_host_code(file: str) -> bool:
    return file.startswith(("src/", "tools/")) and not file.startswith("src/cuda/") and file.endswith((".c", ".h", ".def"))


def figures(table: dict[str, Count]) -> str:
    """One line: what was reached of everything and of the parsers."""
    every, parsers = total(table.values()), total(table[file] for file in PARSERS if file in table)
    return (f"host C: {percent(every.lines_hit, every.lines):.1f} % of {every.lines} lines, "
            f"{percent(every.branches_hit, every.branches):.1f} % of {every.branches} branches; "
            f"parsers: {percent(parsers.lines_hit, parsers.lines):.1f} % of lines, "
            f"{percent(parsers.branches_hit, parsers.branches):.1f} % of {parsers.branches} branches")


def check(table: dict[str, Count], sources: set[str]) -> list[str]:
    """What is wrong with a table; `sources` are the .c files that there are."""
    if not table:
        return [f"{RESULTS} is not there; `make coverage` writes it"]
    every = total(table.values())
    found = [f"{file}: in the table, but there is no such parser" for file in PARSERS if file not in table]
    for name, have, floor in (("lines", percent(every.lines_hit, every.lines), LINES),
                              ("branches", percent(every.branches_hit, every.branches), BRANCHES)):
        if have < floor:
            found.append(f"{have:.1f} % of the {name} are reached, the floor is {floor:g} %")
    found += [f"{file}: {row.lines - row.lines_hit} lines and {row.branches - row.branches_hit} branches are not reached, "
              "the floor of a parser is all" for file, row in table.items()
              if file in PARSERS and (row.lines_hit < row.lines or row.branches_hit < row.branches)]
    known = {file for file in table if file.endswith(".c")}
    if len(known ^ sources) > STALE * len(sources):
        found.append(f"the table is old: {len(known ^ sources)} files are in it or in the tree alone; `make coverage` renews it")
    return found


def load() -> dict[str, Count]:
    """The committed table."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {row.pop("file"): Count(**{key: int(value) for key, value in row.items()}) for row in csv.DictReader(file)}


def host_sources() -> set[str]:
    """The .c files of the host."""
    paths = [*Path("src").glob("*.c"), *Path("src/cpu").glob("*.c"), *Path("tools").glob("*.c"), *Path("tools/train").glob("*.c")]
    return {str(path) for path in paths}


def spans(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3 7"."""
    text, start = [], None
    for i, number in enumerate(numbers):
        start = number if start is None else start
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            text.append(str(start) if start == number else f"{start}-{number}")
            start = None
    return " ".join(text)


def measure() -> dict[str, Count]:
    """Reads the counters of the build, writes the table and says which lines were never reached."""
    data = sorted(Path(os.environ.get("BUILD", "build-coverage"), "obj").resolve().rglob("*.gcda"))
    answer = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", *map(str, data)], check=True,
                            capture_output=True, text=True)
    files = {file: parts for file, parts in merge(map(json.loads, answer.stdout.splitlines())).items() if is_host_code(file)}
    table = {file: count(*files[file]) for file in sorted(files)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["file", *Count._fields])
        writer.writerows([file, *row] for file, row in table.items())
    for file, row in table.items():
        missed = [number for number, times in sorted(files[file][0].items()) if times == 0]
        branches = sorted({number for (number, _), times in files[file][1].items() if times == 0})
        print(f"{percent(row.lines_hit, row.lines):6.1f} % {percent(row.branches_hit, row.branches):6.1f} %  {file}"
              + (f"  lines {spans(missed)}" if missed else "")
              + (f"  branches {spans(branches)}" if branches and file in PARSERS else ""))
    return table


def self_test() -> bool:
    """One report in, the right figures out; each floor is enforced."""
    line = {"line_number": 1, "count": 0, "branches": [{"count": 0}, {"count": 2}]}
    other = line | {"count": 3, "branches": [{"count": 0}, {"count": 0}]}
    merged = merge([{"files": [{"file": "src/a.c", "lines": [line, line | {"line_number": 2}]}]},
                    {"files": [{"file": "tests/../src/a.c", "lines": [other]}]}])
    good = {file: Count(100, 100, 100, 100) for file in PARSERS} | {"src/a.c": Count(1000, 990, 1000, 930)}
    return (count(*merged["src/a.c"]) == Count(2, 1, 4, 2) and spans([1, 2, 3, 7]) == "1-3 7"
            and is_host_code("src/cpu/act.c") and not is_host_code("src/cuda/launch.c") and not is_host_code("tests/a.c")
            and not check(good, set(good)) and len(check({}, set(good))) == 1
            and len(check(good | {"src/a.c": Count(1000, 900, 1000, 900)}, set(good))) == 1
            and len(check(good | {"src/a.c": Count(1000, 990, 1000, 700)}, set(good))) == 1
            and len(check(good | {PARSERS[0]: Count(100, 99, 100, 100)}, set(good))) == 1
            and len(check(good | {PARSERS[0]: Count(100, 100, 100, 99)}, set(good))) == 1
            and len(check(good, set(good) | {"src/b.c", "src/c.c"})) == 1
            and len(check({file: row for file, row in good.items() if file != PARSERS[0]}, set(good))) == 1)


def gate_check() -> list[str]:
    table = measure() if sys.argv[1:] == ["--measure"] else load()
    if table:
        print(figures(table))
    return check(table, host_sources())


if __name__ == "__main__":
    gate.run(self_test, gate_check)
