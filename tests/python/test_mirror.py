# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror against the header.

What moeblas.h declares is read after the preprocessor, a C program that prints sizes, offsets,
kinds and values is generated from it, and the mirror must be the same: no struct, field, constant
or function more or less. The same comparison with planted differences shows that it can fail.
"""

from __future__ import annotations

import ctypes
import enum
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from moeblas import _lib, _structs

CLASSES = {
    1: "int",
    3: "int",
    5: "pointer",
    8: "float",
    12: "struct",
}  # __builtin_classify_type
NOT_MEMBERS = {"MOE_ACT_COUNT"}  # how many there are, in Python the length of the enumeration


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def preprocess(*options: str) -> str:
    return run(
        "gcc",
        "-std=c11",
        "-E",
        *options,
        f"-I{ROOT}/include",
        f"{ROOT}/include/moeblas.h",
    )


def declarations() -> str:
    """moeblas.h without comments, macros and what it includes, on one line."""
    text = preprocess("-P")
    return re.sub(r"\s+", " ", text[text.index("typedef enum moe_status") :])


def parse(text: str) -> dict[str, dict[str, list[str]]]:
    """Kind -> name -> its parts: declarators, constants, or types of result and arguments."""
    found: dict[str, dict[str, list[str]]] = {"struct": {}, "enum": {}, "function": {}}
    for kind, name, body in re.findall(r"typedef (struct|enum) (moe_\w+) \{([^}]*)\}", text):
        parts = body.split(";" if kind == "struct" else ",")
        found[kind][name] = [part.split("=")[0].strip() for part in parts if part.strip()]
    for statement in re.sub(r"\{[^}]*\}", "", text).split(";"):
        function = re.fullmatch(r"(.*[ *])(moe_\w+)\((.*)\)", statement.strip())
        if function:
            arguments = [] if function[3] == "void" else function[3].split(",")
            types = [re.fullmatch(r"(.*?)\w+", argument.strip())[1] for argument in arguments]
            found["function"][function[2]] = [function[1], *types]
    return found


def describe(text: str, scratch: Path) -> dict:
    """The declarations as the compiler sees them: what a generated program prints."""
    parsed = parse(text)
    lines = []

    def show(key: str, value: str, kind: str, offset: str = "0") -> None:
        numbers = f"(size_t)({offset}), sizeof({value}), {kind}"
        lines.append(f'printf("[\\"{key}\\", %zu, %zu, %d],\\n", {numbers});')

    for name, members in parsed["struct"].items():
        show(name, name, "12")
        for member in (re.search(r"\w+$", text)[0] for text in members):
            value = f"(({name} *)0)->{member}"
            kind = f"__builtin_classify_type({value})"
            show(f"{name}.{member}", value, kind, f"offsetof({name}, {member})")
    for name, constants in parsed["enum"].items():
        for constant in constants:
            show(f"{name}.{constant}", "int", "1", constant)
    for name, types in parsed["function"].items():
        for i, type_ in enumerate(types):
            if type_.strip() != "void":
                show(f"{name}({i})", type_, f"__builtin_classify_type(({type_})0)")
    source = scratch / "probe.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n"
        + text.replace(";", ";\n")
        + "\nint main(void) {\n  "
        + "\n  ".join(lines)
        + "\n  return 0;\n}\n"
    )
    run("gcc", "-std=c11", "-w", str(source), "-o", str(scratch / "probe"))
    rows = json.loads("[" + run(str(scratch / "probe")).rstrip().rstrip(",") + "]")
    return {key: (offset, size, CLASSES[kind]) for key, offset, size, kind in rows}


def c_kind(type_: type) -> str:
    if issubclass(type_, ctypes.Structure):
        return "struct"
    if issubclass(type_, (ctypes.c_void_p, ctypes.c_char_p, ctypes._Pointer)):
        return "pointer"
    return "float" if type_._type_ in "fd" else "int"


def c_name(python_name: str) -> str:
    return "moe" + re.sub(r"([A-Z])", r"_\1", python_name).lower()


def mirrored(constants: dict[str, list[str]]) -> dict:
    """The mirror in the form of ``describe``; a member is the constant that ends with its name."""
    found = {}
    for name, kind in vars(_structs).items():
        if not isinstance(kind, type) or kind in (
            ctypes.Structure,
            enum.IntEnum,
            _structs.Sized,
        ):
            continue
        if issubclass(kind, ctypes.Structure):
            found[c_name(name)] = (0, ctypes.sizeof(kind), "struct")
            for field, type_ in kind._fields_:
                place = (
                    getattr(kind, field).offset,
                    ctypes.sizeof(type_),
                    c_kind(type_),
                )
                found[f"{c_name(name)}.{field}"] = place
        elif issubclass(kind, enum.IntEnum):
            for member in kind:
                names = [
                    c for c in constants.get(c_name(name), []) if c.endswith(f"_{member.name}")
                ]
                constant = min(names, key=len, default=f"MOE_?_{member.name}")
                found[f"{c_name(name)}.{constant}"] = (member.value, 4, "int")
    for name, (result, arguments) in _lib.PROTOTYPES.items():
        result = ctypes.c_int if result is _lib._STATUS else result
        for i, type_ in enumerate([result, *arguments]):
            if type_ is not None:
                found[f"{name}({i})"] = (0, ctypes.sizeof(type_), c_kind(type_))
    return found


def differences(text: str, scratch: Path) -> list[str]:
    wanted = describe(text, scratch)
    found = mirrored(parse(text)["enum"])
    return [
        f"{key}: mirror {found.get(key)}, header {wanted.get(key)}"
        for key in sorted(wanted.keys() | found.keys())
        if wanted.get(key) != found.get(key) and key.split(".")[-1] not in NOT_MEMBERS
    ]


def test_mirror_is_the_header(tmp_path: Path) -> None:
    text = declarations()
    parsed = parse(text)
    counts = [len(parsed[kind]) for kind in ("struct", "enum", "function")]
    assert counts[0] >= 7 and counts[1] >= 11 and counts[2] >= 20
    assert differences(text, tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64_t latent;", "int64_t latent; int planted;"),  # a field too many
        ("int64_t latent;", ""),  # a field too few
        ("float up_min; float up_max;", "float up_max; float up_min;"),  # two fields swapped
        ("float capacity_factor;", "int capacity_factor;"),  # another kind
        ("float up_beta;", "double up_beta;"),  # another size
        ("MOE_BF16 = 2", "MOE_BF16 = 4"),  # another value
        ("MOE_DROP_POSITION = 1", "MOE_DROP_POSITION = 1, MOE_DROP_PLANTED = 2"),
        ("MOE_ENTRY_IDS = 2,", ""),
        ("moe_context;", "moe_context; typedef struct moe_a { int b; } moe_a;"),
        ("moe_backend backend, int device)", "moe_backend backend)"),  # an argument too few
        ("int64_t tokens, char *text", "int tokens, char *text"),
        ("size_t moe_plan_saved(", "int moe_plan_saved("),
        ("const char *moe_version(void);", "const char *moe_version(void); int moe_planted(void);"),
    ],
)  # fmt: skip
def test_a_difference_is_found(old: str, new: str, tmp_path: Path) -> None:
    text = declarations()
    assert old in text
    assert len(differences(text.replace(old, new, 1), tmp_path)) >= 1


def test_macros() -> None:
    defined = dict(re.findall(r"^#define MOE_(\w+) (\d+)$", preprocess("-dM"), re.MULTILINE))
    version = dict(zip(("VERSION_MAJOR", "VERSION_MINOR", "VERSION_PATCH"), _structs.VERSION))
    limits = {"MAX_EXPERTS": _structs.MAX_EXPERTS, "MAX_TOPK": _structs.MAX_TOPK}
    assert {name: int(value) for name, value in defined.items()} == {
        **version,
        **limits,
    }


def test_activation_count() -> None:
    kinds = range(len(_structs.Activation))
    assert all(_lib.lib.moe_activation_name(kind, 0) for kind in kinds)
    assert _lib.lib.moe_activation_name(len(kinds), 0) is None


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(AttributeError):
        _structs.ForwardArgs(token=1)
    with pytest.raises(AttributeError):
        _structs.Params().w3 = 0


IMPORT = """
import sys, time
start = time.process_time()
import moeblas
print(time.process_time() - start)
heavy = {"numpy", "torch", "jax", "ml_dtypes", "transformers"} & set(sys.modules)
opened = [line for line in open("/proc/self/maps") if "libcuda.so" in line or "/dev/nvidia" in line]
assert not heavy and not opened, (heavy, opened)
"""


def test_import_is_light() -> None:
    """At most 50 ms of the processor, the best of five, without a heavy module or a driver."""
    assert min(float(run(sys.executable, "-c", IMPORT_PATH + IMPORT)) for _ in range(5)) <= 0.05


IMPORT_PATH = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r})\n"


def test_missing_library() -> None:
    code = IMPORT_PATH + "import os; os.environ['MOEBLAS_LIBRARY'] = '/nowhere.so'\nimport moeblas"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: moeblas: MOEBLAS_LIBRARY = /nowhere.so, which is no file" in done.stderr
