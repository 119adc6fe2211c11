#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: changes one token of the library's C code at a time and asks whether a test notices.

`tools/mutants.py --build DIR` wants a finished build there (`make tests`) and does not touch it: a mutant is an object of its
own that is linked in front of the library. A mutant is killed by the first test that fails, crashes or hangs; tests that speak
of the mutated file come first. A mutant whose object code is that of the original is no mutant, nor is one that does not
compile. The verdicts go to bench/results/mutants.csv; a survivor's reason is written there by hand and kept by the next run."""
from __future__ import annotations

import argparse
import csv
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, NamedTuple

RESULTS = Path("bench/results/mutants.csv")
COLUMNS = ["file", "line", "column", "from", "to", "verdict", "test", "seconds", "code", "reason"]
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
         "*": "/", "/": "*", "%": "/", "+=": "-=", "-=": "+=", "++": "--", "true": "false", "false": "true"}
# Binary operators have spaces around them; the format of the sources is fixed by a gate.
OPERATOR = re.compile(r"(?<=[\w)\]] )(<=?|>=?|==|!=|&&|\|\||[-+*/%]|[-+]=)(?= \S)|(?<=\w)(\+\+)|\b(true|false)\b")
NUMBER = re.compile(r"(?<![\w.])(\d{1,4})(?![\w.])")
CALL = re.compile(r"^ +((?:TRY|RUN|[a-z]\w*)\((?:[^;{}\"]|\"[^\"]*\")*\);)$", re.M)
HIDDEN = re.compile(r"/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]+'|^#\s*(?:include|pragma|if|endif|else|undef)[^\n]*", re.S | re.M)
# Tests by what they speak of; each file's own come first (test_<stem>*), then these and problems against the
# oracle, the quickest first.
GENERAL = ["test_api", "test_bounds", "test_api_ops", "test_api_run", "test_errors", "test_layer",
           "test_token_count", "test_metamorphic", "test_memory", "test_case"]
OWN = {"src/cpu/kernel.c": ["test_gemm_bits", "test_gemm"], "src/cpu/wgrad.c": ["test_gemm"],
       "src/cpu/permute.c": ["test_combine"], "src/cpu/bias_grad.c": ["test_gemm"],
       "src/cpu/convert.c": ["test_format", "test_act"], "src/cpu/token_mask.c": ["test_sort"],
       "src/cpu/router_loss.c": ["test_balance", "test_route_backward"], "src/cpu/isa.c": ["test_gemm_bits"]}
PROBLEMS = ["smoke", "ci", "edge"]


class Mutant(NamedTuple):
    """One change: the text from start to end becomes `to`."""

    file: str
    start: int
    end: int
    to: str


def candidates(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file. Comments, texts and includes have none."""
    code = HIDDEN.sub(lambda cut: re.sub(r"[^\n]", "\0", cut[0]), text)
    for match in OPERATOR.finditer(code):
        yield Mutant(file, match.start(), match.end(), SWAPS[match[0]])
    for match in NUMBER.finditer(code):
        yield Mutant(file, match.start(), match.end(), str(int(match[0]) + 1))
        if int(match[0]) > 0:
            yield Mutant(file, match.start(), match.end(), str(int(match[0]) - 1))
    for match in CALL.finditer(code.replace("\0", " ")):
        yield Mutant(file, match.start(1), match.end(1), ";")


def place(mutant: Mutant, text: str) -> dict[str, object]:
    """Where a mutant is and what it changes; the code and what is replaced without runs of blanks."""
    line = text.count("\n", 0, mutant.start)
    return {"file": mutant.file, "line": line + 1, "column": mutant.start - text.rfind("\n", 0, mutant.start),
            "from": " ".join(text[mutant.start : mutant.end].split()), "to": mutant.to,
            "code": " ".join(text.splitlines()[line].split())}


def key(row: dict[str, object]) -> tuple[str, ...]:
    """What stays of a mutant while lines move."""
    return tuple(str(row[name]) for name in ("file", "code", "column", "from", "to"))


def choose(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """About `count` mutants, of each file in proportion to the root of how many it has."""
    draw = random.Random(seed)
    every = {file: list(candidates(file, text)) for file, text in sources.items()}
    total = sum(len(found) ** 0.5 for found in every.values())
    chosen = []
    for file, found in every.items():
        wanted = min(len(found), round(count * len(found) ** 0.5 / total))
        chosen += draw.sample(found, wanted)
    draw.shuffle(chosen)
    return chosen


def run(command: list[str] | str, limit: float) -> tuple[int, float]:
    """(exit status, seconds); 124 after the limit."""
    start = time.monotonic()
    try:
        done = subprocess.run(command, shell=isinstance(command, str), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              stdin=subprocess.DEVNULL, timeout=limit, check=False)
        status = done.returncode
    except subprocess.TimeoutExpired:
        status = 124
    return status, time.monotonic() - start


class Bench:
    """Compiles, links and tests one mutant at a time in a folder of its own."""

    def __init__(self, build: Path, work: Path, sources: dict[str, str]) -> None:
        self.build, self.work, self.sources = build, work, sources
        self.seconds: dict[str, float] = {}  # of a test without a mutant
        self.links: dict[str, str] = {}
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.compile = {file: self.commands(file) for file in sources}
        self.originals = {file: self.objects(file, text, "original") for file, text in sources.items()}

    def make_says(self, target: str, changed: str) -> list[str]:
        """The compiler calls by which make would renew the target."""
        answer = subprocess.run(["make", "-n", "V=1", "CUDA=0", f"BUILD={self.build}", "-W", changed, target], check=True,
                                capture_output=True, text=True).stdout
        return [line for line in answer.replace("\\\n", " ").splitlines() if line.startswith("gcc ")]

    def commands(self, file: str) -> list[str]:
        """The compiler call of each object of the source, without input and output."""
        stem = file.removesuffix(".c")
        objects = [stem] if file != "src/cpu/kernel.c" else [f"{stem}_{isa}" for isa in ("base", "avx2", "avx512")]
        calls = [call for name in objects for call in self.make_says(f"{self.build}/obj/{name}.o", file)]
        return [re.sub(r"-MMD|-MP|-g\b|-c \S+|-o \S+", "", call) + " -O1" for call in calls]

    def objects(self, file: str, text: str, name: str) -> list[Path] | None:
        """The objects of this text of the file, or None if it does not compile."""
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        source = folder / Path(file).name
        source.write_text(text, encoding="utf-8")
        made = []
        for i, call in enumerate(self.compile[file]):
            made.append(folder / f"{source.stem}_{i}.o")
            status, _ = run(f"cd {folder} && {call.replace('-Iinclude', f'-I{Path.cwd()}/include')} -iquote {Path.cwd()}/src "
                            f"-iquote {Path.cwd()}/{Path(file).parent} -c {source.name} -o {made[-1].name}", 300)
            if status != 0:
                return None
        return made

    def link(self, test: str, objects: list[Path], folder: Path) -> Path:
        """The test with these objects in front of the library."""
        program = folder / test.partition(" ")[0]
        if program.exists():
            return program
        library = f"{self.build}/libmoeblas.a"
        if test not in self.links:
            target = f"{self.build}/moeblas" if test.startswith("moeblas") else f"{self.build}/tests/{test}"
            self.links[test] = self.make_says(target, library)[-1]
        call = re.sub(r"-o \S+", f"-o {program}", self.links[test])
        subprocess.run(call.replace(library, f"{' '.join(map(str, objects))} {library}", 1), shell=True, check=True)
        return program

    def tests_of(self, file: str) -> list[str]:
        """The tests in the order in which they are asked."""
        own = sorted(path.stem for path in Path("tests").glob(f"test_{Path(file).stem}*.c")) + OWN.get(file, [])
        general = GENERAL[1:8] if file.startswith("src/cpu") else GENERAL
        rest = sorted(general + [f"moeblas {name}" for name in PROBLEMS], key=lambda test: self.seconds.get(test, 0))
        return list(dict.fromkeys(own + rest))

    def passes(self, test: str, objects: list[Path], folder: Path) -> tuple[bool, float]:
        """(whether the test passes, seconds)."""
        program = self.link(test, objects, folder)
        arguments = ["check", f"@tests/problems/{test.split()[1]}.txt"] if test.startswith("moeblas") else []
        status, seconds = run([str(program), *arguments], 30 + 8 * self.seconds.get(test, 60))
        return status == 0, seconds

    def calibrate(self, tests: list[str]) -> None:
        """The unchanged library must pass; sets the limits of time."""
        for test in tests:
            good, seconds = self.passes(test, [], self.work)
            if not good:
                sys.exit(f"mutants: {test} fails without a mutant")
            self.seconds[test] = seconds

    def judge(self, mutant: Mutant, name: str) -> dict[str, object]:
        """A row of the results."""
        text = self.sources[mutant.file]
        row = place(mutant, text) | {"test": "", "reason": ""}
        start = time.monotonic()
        objects = self.objects(mutant.file, text[: mutant.start] + mutant.to + text[mutant.end :], name)
        if objects is None:
            row["verdict"] = "does not compile"
        elif all(a.read_bytes() == b.read_bytes() for a, b in zip(objects, self.originals[mutant.file] or [])):
            row["verdict"] = "same code"
        else:
            row["verdict"] = "survived"
            for test in self.tests_of(mutant.file):
                if not self.passes(test, objects, self.work / name)[0]:
                    row |= {"verdict": "killed", "test": test}
                    break
        row["seconds"] = f"{time.monotonic() - start:.1f}"
        shutil.rmtree(self.work / name)
        return row


def summary(table: list[dict[str, str]]) -> str:
    """Score of a table of results; survivors that have a reason count as no mutants."""
    verdicts = ("killed", "survived", "same code", "does not compile")
    counts = {verdict: sum(row["verdict"] == verdict for row in table) for verdict in verdicts}
    excused = sum(row["verdict"] == "survived" and row["reason"] != "" for row in table)
    judged = counts["killed"] + counts["survived"]
    score, fair = (100 * counts["killed"] / max(all_of, 1) for all_of in (judged, judged - excused))
    return (f"{len(table)} mutants: {counts['killed']} killed, {counts['survived']} survived, {excused} of these with a reason why no "
            f"test can notice, {counts['same code']} with the same code, {counts['does not compile']} that do not compile; "
            f"score {score:.1f} %, without the excused {fair:.1f} %")


def load() -> list[dict[str, str]]:
    """The committed table."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def save(table: list[dict[str, object]]) -> None:
    """Writes the table, with the reasons that the last one had for the same change of the same line of code."""
    known = {key(row): row["reason"] for row in load()}
    for row in table:
        row["reason"] = known.get(key(row), "") if row["verdict"] == "survived" else ""
    table.sort(key=lambda row: (row["file"], int(str(row["line"])), int(str(row["column"])), row["to"]))
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--build", type=Path, default=Path("build"), help="a finished build without CUDA")
    parser.add_argument("--count", type=int, default=300, help="mutants, about")
    parser.add_argument("--seconds", type=float, default=2400, help="after which no mutant is begun")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="part of the name of a file")
    parser.add_argument("--survivors", action="store_true", help="once more those that survived without a reason, beside the others' old verdicts")
    parser.add_argument("--summary", action="store_true", help="of the committed table, without a run")
    options = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[1])
    if options.summary:
        print(summary(load()))
        return 0
    os.environ |= {"OMP_WAIT_POLICY": "passive", "MOEBLAS_PRESETS": f"{Path.cwd()}/data/presets.csv"}
    for limit, most in ((resource.RLIMIT_AS, 16 << 30), (resource.RLIMIT_FSIZE, 1 << 30), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))  # a mutant may ask for anything
    start = time.monotonic()
    files = [path for folder in ("src", "src/cpu") for path in sorted(Path(folder).glob("*.c")) if options.only in str(path)]
    sources = {str(path): path.read_text(encoding="utf-8") for path in files}
    bench = Bench(options.build.resolve(), options.build.resolve() / "mutants", sources)
    bench.calibrate(sorted({test for file in sources for test in bench.tests_of(file)}))
    print(f"{len(sources)} files, limits set after {time.monotonic() - start:.0f} s", flush=True)
    table: list[dict[str, object]] = []

    def one(pair: tuple[int, Mutant]) -> None:
        if time.monotonic() - start < options.seconds:
            row = bench.judge(pair[1], f"mutant{pair[0] % 1000}")
            table.append(row)
            print(f"{row['verdict']:16} {row['file']}:{row['line']} {row['from']} -> {row['to']} {row['test']}", flush=True)

    chosen = choose(sources, options.count, options.seed)
    if options.survivors:
        old = load()
        keys = {key(row) for row in old if row["verdict"] == "survived" and not row["reason"]}
        table += [row for row in old if key(row) not in keys]
        chosen = [mutant for file, text in sources.items() for mutant in candidates(file, text)
                  if key(place(mutant, text)) in keys]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, enumerate(chosen)))
    save(table)
    print(summary([{key: str(value) for key, value in row.items()} for row in table]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
