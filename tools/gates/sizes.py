#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: how long files and functions may be.

Files have at most 500 lines, public headers 600, the Makefile 125; 90 % of the functions have fewer than 60 lines and
none more than 120. Functions are found by their shape, which clang-format fixes: they start in column 0, and so does the
brace that ends them. Prints the longest functions. `--self-test` shows that each limit is enforced."""
import re
import statistics

from lib import gate


def file_limit(path):
    return 125 if path == "Makefile" else 600 if re.fullmatch(r"include/.*\.h", path) else 500


def functions(text):
    """(name, line, length) of every function with a body."""
    start = None  # name and line of the declaration being read
    opened = False
    for number, line in enumerate(text.splitlines(), 1):
        if start is None:
            match = re.match(r"[A-Za-z_][^=;#]*?(\w+)\(", line)
            start, opened = (match and (match[1], number)), False
        if start is None:
            continue
        opened = opened or line.endswith("{") or "{ " in line
        if not opened and line.endswith(";"):
            start = None  # it was a declaration
        elif opened and (line.startswith("}") or (number == start[1] and line.endswith("}"))):
            yield (*start, number - start[1] + 1)
            start = None


def check(texts):
    found = []
    lengths = []
    for path, text in texts.items():
        lines = text.count("\n")
        if lines > file_limit(path):
            found.append(f"{path}: {lines} lines, the limit is {file_limit(path)}")
        if path.endswith((".c", ".h", ".cu", ".cuh")):
            lengths += [(length, f"{path}:{line} {name}") for name, line, length in functions(text)]
    lengths.sort(reverse=True)
    return found + gate.too_long(lengths), lengths


def self_test():
    def body(lines):
        return "static int f(int x,\n             int y) {\n" + "  x++;\n" * (lines - 3) + "}\n"

    prototype = "int h(int x,\n      int y);\n"
    one_line = prototype + "static int g(void) { return 1; }\n"
    cases = [
        ({"src/a.c": "\n" * 501}, 1), ({"src/a.c": "\n" * 500}, 0), ({"include/a.h": "\n" * 601}, 1),
        ({"Makefile": "\n" * 126}, 1), ({"src/a.c": body(121) + one_line * 20}, 1), ({"src/a.c": body(120) + one_line * 20}, 0),
        ({"src/a.c": body(60) + one_line * 8}, 1), ({"src/a.c": body(60) + one_line * 9}, 0),
    ]
    return all(len(check(texts)[0]) == want for texts, want in cases)


def gate_check():
    files = gate.read_files("*.c", "*.h", "*.def", "*.cu", "*.cuh", "*.py", "*.sh", "*.cmake", "*.mk", "Makefile")
    found, lengths = check(files)
    for length, where in lengths[:10]:
        print(f"{length:5} lines  {where}")
    median = statistics.median(length for length, _ in lengths)
    print(f"{len(files)} files, {len(lengths)} functions, median {median:g} lines")
    return found


gate.run(self_test, gate_check)
