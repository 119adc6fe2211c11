#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints how reliable the library was measured to be, and writes docs/scoreboard.md.

Each row is a question of the trade: what is measured, and what is to be reached before 1.0. An answer comes from a committed
table (coverage, mutants, errors, sizes) or was recorded by whoever ran the command:

    tools/scoreboard.py --record M5 "0 crashes, 0 leaks" "build/tests/test_alloc_failure"

which keeps the figure with the day and the commit in bench/results/quality.csv. A row without an answer says "not measured"."""
from __future__ import annotations

import argparse
import csv
import datetime
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

PAGE = Path("docs/scoreboard.md")
RECORDS = Path("bench/results/quality.csv")
HEADER = """# Scoreboard

What the reliability of moeblas was measured to be: printed and written by `make scoreboard`. "Aim" is what is to be reached before
1.0. A figure without a command would be a claim, so each has one, with the day and the commit it was run at; "src +n" says how many
later commits touch `src/`, so that it may be out of date. What nobody has measured says so.

"""
# id, what is measured, aim
ROWS = [
    ("Correctness", None, None),
    ("C1", "results within the derived bound of the double oracle", "10^6 cases, ratio of error to bound at most 1"),
    ("C2", "cases with exact answers, bit for bit", "50 000"),
    ("C4", "error over that of PyTorch's bf16 layer", "at most 1 in the median, 1.5 at worst"),
    ("C5", "gradients against the oracle's, all of them, second run bit-equal", "all"),
    ("C6", "routing: ids and weights equal to the reference, ties and NaN included", "10^8 tokens"),
    ("C7", "training: gap of the loss to a reference after 1000 steps, 3 seeds", "0.1 %"),
    ("Determinism", None, None),
    ("D1", "run to run, every bit", "1000 runs of 500 shapes, also beside other work"),
    ("D2", "a token's output is independent of the batch", "all"),
    ("D3", "any number of threads gives the same bits", "all"),
    ("D4", "tokens and experts in another order give the same bits", "all"),
    ("Memory", None, None),
    ("M1", "compute-sanitizer, four tools, reports", "0"),
    ("M2", "ASan, UBSan, TSan, valgrind over the suite, findings", "0"),
    ("M3", "guard pages and canaries around every array, poisoned outputs", "0 differences"),
    ("M4", "allocations and synchronisations in run calls", "0"),
    ("M5", "the n-th allocation fails, each n, once and from then on", "no crash, no leak"),
    ("Hostile input", None, None),
    ("F1", "parsers under libFuzzer, executions without a finding", "10^9"),
    ("F2", "random descriptors against the interface", "10^9"),
    ("F3", "sentences of docs/errors.md that a test provokes and reads", "all"),
    ("S3", "known classes of faults in readers of model files, one file each", "all refused"),
    ("Tests", None, None),
    ("V1", "host C that the suite reaches", "97 % of lines, 92 % of branches, parsers 100 %"),
    ("V2", "changes of one token that a test notices", "90 %"),
    ("V3", "lines of tests over lines of code", "4"),
    ("Load", None, None),
    ("T1", "threads that share a plan, wrong answers", "16 threads, 8 hours, 0"),
    ("T2", "soak: drift of memory, slow calls", "10^7 calls, 0 bytes"),
    ("T3", "CUDA graph replays with changing counts, bit-equal", "10^6"),
    ("T4", "beside a kernel that holds the multiprocessors", "no hang in 8 hours"),
    ("T5", "trainings killed and resumed, lost checkpoints or other bits", "100 kills, 0"),
    ("Build", None, None),
    ("I1", "PyTorch, JAX and Transformers: tests of the bindings", "all, on three versions each"),
    ("I2", "interface against the last release: breaks", "0"),
    ("S1", "RELRO, NOW, NX, PIE, canaries, FORTIFY, equal hash of two builds", "all"),
    ("S2", "clang-tidy, cppcheck, -fanalyzer: unexplained reports", "0"),
    ("Use", None, None),
    ("P1", "spread of the medians of a benchmark over 5 rounds", "1 %"),
    ("P2", "shapes slower than at the last release by 3 %", "0"),
    ("E1", "undocumented public names; examples that do not run", "0"),
    ("E2", "from a clone to passed tests; from the library to the first call", "2 minutes; 20 s"),
]


class Answer(NamedTuple):
    """A figure, the command that gives it, the day and the commit of the measurement."""

    figure: str
    command: str
    date: str
    commit: str


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def recorded() -> dict[str, Answer]:
    """What was recorded by hand."""
    if not RECORDS.exists():
        return {}
    with RECORDS.open(encoding="utf-8", newline="") as file:
        return {row["id"]: Answer(row["figure"], row["command"], row["date"], row["commit"]) for row in csv.DictReader(file)}


def record(name: str, figure: str, command: str) -> None:
    """Keeps a figure, in place of an older one of the same row."""
    if name not in {row[0] for row in ROWS if row[1]}:
        raise SystemExit(f"scoreboard: --record {name}: wanted one of {' '.join(row[0] for row in ROWS if row[1])}")
    answers = recorded() | {name: Answer(figure, command, datetime.date.today().isoformat(), git("rev-parse", "--short", "HEAD"))}
    with RECORDS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", *Answer._fields])
        writer.writerows([key, *answers[key]] for key in sorted(answers))


def both(one: Answer, other: Answer) -> Answer:
    """Two answers of one row; as old as the older."""
    older = min(one, other, key=lambda answer: answer.date)
    return Answer(f"{one.figure}; {other.figure}", f"{one.command}; {other.command}", older.date, older.commit)


def of_file(path: str, figure: str, command: str) -> Answer:
    """An answer that a committed file holds."""
    date, commit = (git("log", "-1", "--format=%cs %h", "--", path) or "uncommitted uncommitted").split()
    return Answer(figure, command, date, commit)


def tool_says(*command: str) -> str:
    """The first line that mentions a per cent in the output of a tool."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return next((line for line in done.stdout.splitlines() if " % " in line or line.endswith(" %")), "")


def lines_of(*patterns: str) -> int:
    files = git("ls-files", *patterns).splitlines()
    return sum(Path(file).read_bytes().count(b"\n") for file in files if Path(file).exists())


def verified() -> dict[str, Answer]:
    """What the last run on a GPU says."""
    path = "tests/cuda/verified.txt"
    text = Path(path).read_text(encoding="utf-8")
    gpu = re.search(r"^gpu, driver: (.*)$", text, re.M)[1]
    tools = re.findall(r"^compute-sanitizer (\w+) \w+: (\d+) passed, (\d+) failed", text, re.M)
    checks = re.search(r"^check: (\d+) passed, (\d+) failed", text, re.M)
    twice = re.search(r"^check --bitwise \w+: (\d+) passed, (\d+) failed", text, re.M)
    return {"C1": of_file(path, f"{checks[1]} problems within it, {checks[2]} not; {gpu}", "make gpu-check"),
            "D1": of_file(path, f"{twice[1]} problems twice, {twice[2]} differ; {gpu}", "make gpu-check"),
            "M1": of_file(path, f"{sum(int(bad) for _, _, bad in tools)} problems with a report: "
                                f"{', '.join(f'{tool} on {good}' for tool, good, _ in tools)}; {gpu}", "make gpu-check")}


def derived() -> dict[str, Answer]:
    """What committed tables and the tree say."""
    answers = {}
    coverage = tool_says("tools/gates/coverage.py")
    if coverage:
        answers["V1"] = of_file("bench/results/coverage.csv", coverage, "make coverage")
    mutants = tool_says("tools/mutants.py", "--summary")
    if Path("bench/results/mutants.csv").exists() and mutants:
        answers["V2"] = of_file("bench/results/mutants.csv", mutants, "make mutants")
    page = Path("docs/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [A-Z/]+ \| `.*` \| ([^|]+) \| ", page, re.M)
    answers["F3"] = of_file("docs/errors.md", f"{rows.count('test') + rows.count('mock')} of {len(rows)}; the others need another build or processor",
                            "build/tests/test_errors; build/tests/mock_cuda")
    answers |= verified()
    tests, code = lines_of("tests/*.[ch]", "tests/*.sh", "tests/*.py"), lines_of("src", "include", "tools/*.[ch]", "python/*.py", "python/*.c")
    answers["V3"] = Answer(f"{tests / code:.2f} ({tests} over {code})", "make scoreboard", datetime.date.today().isoformat(),
                           git("rev-parse", "--short", "HEAD"))
    return answers


def age(commit: str) -> str:
    """How many commits have touched src/ since."""
    done = subprocess.run(["git", "rev-list", "--count", f"{commit}..HEAD", "--", "src"], capture_output=True, text=True, check=False)
    later = done.stdout.strip()
    return f", src +{later}" if done.returncode == 0 and later != "0" else ""


def table(answers: dict[str, Answer]) -> str:
    """The page's tables, one a topic."""
    text = []
    for name, item, aim in ROWS:
        if item is None:
            text.append(f"\n## {name}\n\n| | measure | aim | measured | when | command |\n|---|---|---|---|---|---|")
            continue
        answer = answers.get(name)
        when = f"{answer.date}, {answer.commit}{age(answer.commit)}" if answer else ""
        text.append(f"| {name} | {item} | {aim} | {answer.figure if answer else '**not measured**'} | {when} | "
                    f"{'`' + answer.command + '`' if answer else ''} |")
    return "\n".join(text).lstrip() + "\n"


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", nargs=3, metavar=("ID", "FIGURE", "COMMAND"))
    options = parser.parse_args()
    if options.record:
        record(*options.record)
    answers = recorded()
    for name, answer in derived().items():
        answers[name] = both(answer, answers[name]) if name in answers else answer
    PAGE.write_text(HEADER + table(answers), encoding="utf-8")
    for name, item, aim in ROWS:
        if item is None:
            print(f"\n{name}")
        else:
            print(f"  {name:3} {item}\n      {answers[name].figure if name in answers else 'not measured'}   (aim: {aim})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
