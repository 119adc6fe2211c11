#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: the dependency rule of docs/design.md section 2, read from the #include lines.

A quoted include is looked up beside its file and then in the include path of the Makefile; the folder it is found in
must be one that the including folder may see. Intrinsics stay below src/cpu, CUDA headers below src/cuda.
`--self-test` shows that each kind of violation is found."""
import os
import re

from lib import gate

SEES = {  # folder -> folders it may include from, in the order of lookup
    "include": ["include"],
    "src": ["src", "include"],
    "src/cpu": ["src/cpu", "src", "include"],
    "src/cuda": ["src/cuda", "src", "include"],
    "tools": ["tools", "include"],
    "examples": ["include"],
    "python": ["python", "include"],
    "tests": ["tests", "src", "src/cpu", "src/cuda", "tools", "include"],
}
TOOLS_ALSO = "tests/oracle.h"
SYSTEM_ONLY_IN = [(r"(imm|arm_neon|x86)\w*\.h", "src/cpu"), (r"(cuda|cublas|nv)\w*\.h", "src/cuda")]


def folder_of(path):
    """The longest key of SEES that holds the path."""
    inside = [folder for folder in SEES if path.startswith(folder + "/")]
    return max(inside, key=len) if inside else None


def violation(source, bracket, name, exists):
    """What is wrong with one include line, or None."""
    home = folder_of(source)
    if home is None:
        return "lies in no known folder"
    for pattern, owner in SYSTEM_ONLY_IN:
        if bracket == "<" and re.fullmatch(pattern, name) and home != owner and home in ("include", "src", "src/cpu", "src/cuda"):
            return f"<{name}> belongs in {owner}/"
    if bracket == "<":
        return None
    places = [os.path.dirname(source)] + SEES[home] + ["tests"]
    found = [path for path in (os.path.normpath(f"{place}/{name}") for place in places) if exists(path)]
    if not found:
        return f'"{name}" is not found'
    target = found[0]
    if folder_of(target) in SEES[home] or (home == "tools" and target == TOOLS_ALSO):
        return None
    return f'{home}/ may not include "{target}"'


def check(files, read, exists):
    found = []
    for path in files:
        for number, line in enumerate(read(path).splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^">]+)[">]', line)
            wrong = match and violation(path, match[1], match[2], exists)
            if wrong:
                found.append(f"{path}:{number}: {wrong}")
    return found


def self_test():
    tree = {
        "include/a.h": "", "src/b.h": "", "src/cpu/c.h": "", "src/cuda/d.h": "", "tools/t.h": "", "tests/oracle.h": "",
        "tests/test.h": "",
    }
    good = {
        "src/x.c": '#include "b.h"\n#include "a.h"', "src/cpu/x.c": '#include "../b.h"\n#include <immintrin.h>',
        "tools/train/x.c": '#include "../t.h"\n#include "oracle.h"', "tests/x.c": '#include "../src/cpu/c.h"',
    }
    bad = {
        "src/y.c": '#include "cpu/c.h"', "src/z.c": "#include <immintrin.h>", "src/cpu/y.c": '#include "../cuda/d.h"',
        "src/cuda/y.c": '#include "../cpu/c.h"', "tools/y.c": '#include "../src/b.h"', "tools/z.c": '#include "test.h"',
        "examples/y.c": '#include "t.h"', "include/y.h": '#include "../src/b.h"', "src/w.c": '#include "nowhere.h"',
    }
    everything = {**tree, **good, **bad}
    found = {line.split(":")[0] for line in check(everything, everything.get, everything.__contains__)}
    return found == set(bad)


def gate_check():
    files = gate.read_files("*.c", "*.h", "*.def", "*.cu", "*.cuh")
    print(f"{len(files)} files")
    return check(list(files), files.get, os.path.isfile)


gate.run(self_test, gate_check)
