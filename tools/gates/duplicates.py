#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: no run of 12 or more lines of code stands twice in src/, tools/, tests/ or examples/.

Lines are compared without white space, comments, blank lines and #includes. `--self-test` shows that a planted copy is
found, and that 11 equal lines are not."""
import re

from lib import gate

RUN = 12


def code_lines(text):
    """(line number, normalised line) of what counts."""
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    for number, line in enumerate(text.splitlines(), 1):
        squeezed = re.sub(r"\s+", "", re.sub(r"//.*", "", line))
        if squeezed and not squeezed.startswith("#include"):
            yield number, squeezed


def check(texts):
    """One line a pair of equal runs, each as long as it goes."""
    lines = {path: list(code_lines(text)) for path, text in texts.items()}
    seen = {}
    found = []
    for path, code in lines.items():
        covered = 0  # end of the copy reported last
        for i in range(len(code) - RUN + 1):
            key = tuple(line for _, line in code[i : i + RUN])
            other, j = seen.setdefault(key, (path, i))
            if i < covered or (other == path and i < j + RUN):
                continue
            n = RUN
            while i + n < len(code) and j + n < len(lines[other]) and code[i + n][1] == lines[other][j + n][1]:
                n += 1
            covered = i + n
            found.append(f"{path}:{code[i][0]}: {n} lines as at {other}:{lines[other][j][0]}")
    return found


def self_test():
    run = "".join(f"  x{i} = {i};\n" for i in range(RUN))
    twice = check({"a.c": "int a;\n" + run, "b.c": "int b;\n/* c */\n" + run.replace("  ", "\t") + "int c;\n"})
    same_file = check({"a.c": run + "int y;\n" + run})
    short = check({"a.c": run, "b.c": run.replace("x0", "z")})
    return len(twice) == 1 and len(same_file) == 1 and not short


def gate_check():
    files = gate.read_files(*[f"{folder}/*{end}" for folder in ("src", "tools", "tests", "examples") for end in (".c", ".h", ".cu", ".cuh")])
    print(f"{len(files)} files")
    return check(files)


gate.run(self_test, gate_check)
