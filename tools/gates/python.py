#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: what every Python file of the package, its tests and the examples keeps to.

Lines of at most 100 columns, the licence named, nothing that pyflakes finds, one function in ten of 60 lines or more and
none beyond 120. In the package, what is public has a docstring, and type hints for its arguments and its result.
`--self-test` shows that each violation is found."""
import ast
import os
import subprocess
import sys
import tempfile

from lib import gate

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def public_parts(tree):
    """The public classes, functions and methods of a module; what is local to a function is not."""
    for node in tree.body:
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or node.name.startswith("_"):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from public_parts(node)


def undocumented(path, tree):
    """One line for each thing that is missing from the public parts."""
    if not ast.get_docstring(tree):
        yield f"{path}: the module has no docstring"
    for node in public_parts(tree):
        trivial = isinstance(node, ast.ClassDef) and not any(isinstance(part, FUNCTIONS) for part in node.body)
        if not ast.get_docstring(node) and not trivial:
            yield f"{path}:{node.lineno}: {node.name} has no docstring"
        if isinstance(node, FUNCTIONS):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                yield f"{path}:{node.lineno}: {node.name} lacks type hints: {', '.join(bare) or 'its result'}"


def flakes(texts):
    """What pyflakes says of the files."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
            with open(f"{folder}/{path}", "w", encoding="utf-8") as file:
                file.write(text)
        python = os.environ.get("PYTHON", sys.executable)
        done = subprocess.run([python, "-m", "pyflakes", *texts], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.splitlines() + done.stderr.splitlines()


def check(texts):
    found = flakes(texts)
    lengths = []
    for path, text in texts.items():
        lines = text.splitlines()
        found += [f"{path}:{i}: {len(line)} columns, the limit is 100" for i, line in enumerate(lines, 1) if len(line) > 100]
        if "SPDX-License-Identifier: Apache-2.0" not in "".join(lines[:2]):
            found.append(f"{path}: no SPDX licence line")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # pyflakes has said so
        lengths += [(n.end_lineno - n.lineno + 1, f"{path}:{n.lineno} {n.name}") for n in ast.walk(tree) if isinstance(n, FUNCTIONS)]
        if path.startswith("python/moeblas/"):
            found += undocumented(path, tree)
    return found + gate.too_long(lengths), lengths


def self_test():
    head = "# SPDX-License-Identifier: Apache-2.0\n"
    package = head + '"""M."""\n'
    hinted = 'def f(a: int) -> int:\n    """F."""\n    return a\n'
    cases = [
        ("tests/python/a.py", head, 0), ("tests/python/a.py", "", 1), ("tests/python/a.py", head + "x = " + "1" * 97, 1),
        ("tests/python/a.py", head + "import os\n", 1), ("tests/python/a.py", head + "x = (\n", None),
        ("tests/python/a.py", head + "def f():\n" + "    x = 1\n    print(x)\n" * 30, 1),
        ("python/moeblas/a.py", package + hinted, 0), ("python/moeblas/a.py", head, 1),
        ("python/moeblas/a.py", package + hinted.replace("a: int", "a"), 1),
        ("python/moeblas/a.py", package + hinted.replace(" -> int", ""), 1),
        ("python/moeblas/a.py", package + hinted.replace('"""F."""', "pass"), 1),
        ("python/moeblas/a.py", package + "class C:\n    def f(self) -> int:\n        return 1\n", 2),
        ("python/moeblas/a.py", package + "def _f(a):\n    return a\n", 0),
    ]
    wrong = [(text, found) for path, text, want in cases for found in [check({path: text})[0]]
             if (len(found) != want if want is not None else not found)]
    print(*wrong, sep="\n")
    return not wrong


def gate_check():
    files = gate.read_files("python/*.py", "tests/python/*.py", "examples/*.py", "bench/*.py")
    found, lengths = check(files)
    print(f"{len(files)} files, {len(lengths)} functions")
    return found


gate.run(self_test, gate_check)
