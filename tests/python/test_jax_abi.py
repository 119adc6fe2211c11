# SPDX-License-Identifier: Apache-2.0
"""python/native/xla_ffi.h against the header of XLA's ABI that jaxlib carries.

The compiler compares every offset, size and value: a probe of static assertions is generated from
the pairs below. A struct, a field or a constant of our header that is in no pair fails too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

NATIVE = Path(__file__).resolve().parents[2] / "python" / "native"
HEAD = {"size": "struct_size", "extensions": "extension_start"}
GET = {**HEAD, "context": "ctx"}

# our struct: (XLA's, {our field: XLA's})
STRUCTS = {
    "xla_extension": ("Extension_Base", {"size": "struct_size", "type": "type", "next": "next"}),
    "xla_version": ("Api_Version", {**HEAD, "major": "major_version", "minor": "minor_version"}),
    "xla_metadata": (
        "Metadata",
        {"size": "struct_size", "version": "api_version", "traits": "traits"},
    ),
    "xla_metadata_extension": (
        "Metadata_Extension",
        {"head": "extension_base", "metadata": "metadata"},
    ),
    "xla_span": ("ByteSpan", {"data": "ptr", "length": "len"}),
    "xla_array": ("Array", {"dtype": "dtype", "length": "size", "data": "data"}),
    "xla_buffer": (
        "Buffer",
        {**HEAD, "dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"},
    ),
    "xla_buffers": ("Args", {**HEAD, "count": "size", "kinds": "types", "items": "args"}),
    "xla_attributes": (
        "Attrs",
        {**HEAD, "count": "size", "kinds": "types", "names": "names", "items": "attrs"},
    ),
    "xla_error_args": ("Error_Create_Args", {**HEAD, "message": "message", "code": "errc"}),
    "xla_context_args": ("Stream_Get_Args", {**GET, "value.stream": "stream"}),
    "xla_api": (
        "Api",
        {
            **HEAD,
            "version": "api_version",
            "internal": "internal_api",
            "create_error": "XLA_FFI_Error_Create",
            "unused": "XLA_FFI_Error_GetMessage",
            "get_stream": "XLA_FFI_Stream_Get",
            "more_unused": "XLA_FFI_Type_Register",
            "get_device": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
    "xla_frame": (
        "CallFrame",
        {
            **HEAD,
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "operands": "args",
            "results": "rets",
            "attributes": "attrs",
        },
    ),
}
# More of XLA's structs that one of ours stands for.
TWINS = [
    ("xla_buffers", "Rets", {**HEAD, "count": "size", "kinds": "types", "items": "rets"}),
    ("xla_context_args", "DeviceOrdinal_Get_Args", {**GET, "value.device": "device_ordinal"}),
]
# Passed to XLA by us: it refuses a size below its own.
FILLED = {"xla_error_args": "Error_Create_Args", "xla_context_args": "Stream_Get_Args"}
# Fields that are themselves structs, compared on their own, or stand for several of XLA's.
PARTLY = ("version", "operands", "results", "attributes", "unused", "more_unused")
# In version 0.4, where all of the above is as it was.
RENAMED = {"Extension_Base": "InternalExtension", "Error_GetMessage": "Error_GetDetails"}
CONSTANTS = {
    "XLA_MAJOR": "API_MAJOR",
    "XLA_METADATA": "Extension_Metadata",
    "XLA_INSTANTIATE": "ExecutionStage_INSTANTIATE",
    "XLA_PREPARE": "ExecutionStage_PREPARE",
    "XLA_INITIALIZE": "ExecutionStage_INITIALIZE",
    "XLA_EXECUTE": "ExecutionStage_EXECUTE",
    "XLA_COMMAND_BUFFER": "HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "XLA_BUFFER": "ArgType_BUFFER",
    "XLA_ARRAY": "AttrType_ARRAY",
    "XLA_STRING": "AttrType_STRING",
    "XLA_INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT",
    "XLA_RESOURCE_EXHAUSTED": "Error_Code_RESOURCE_EXHAUSTED",
    "XLA_UNIMPLEMENTED": "Error_Code_UNIMPLEMENTED",
    "XLA_INTERNAL": "Error_Code_INTERNAL",
    **{f"XLA_{name}": f"DataType_{name}" for name in ("PRED", "S32", "U8", "F16", "F32", "BF16")},
}


def our_header():
    text = re.sub(r"/\*.*?\*/", "", (NATIVE / "xla_ffi.h").read_text(), flags=re.DOTALL)
    return text.replace("XLA_HEAD", "size_t size; struct xla_extension *extensions;")


def our_structs():
    """Name -> fields, as declared."""
    found = {}
    for name, body in re.findall(r"struct (xla_\w+) \{(.*?)\n\};", our_header(), flags=re.DOTALL):
        union = re.search(r"union \{(.*?)\} value;", body, flags=re.DOTALL)
        if union:
            body = body.replace(union[0], re.sub(r"(\w+);", r"value.\1;", union[1]))
        fields = re.findall(r"\(\*(\w+)\)\(|([\w.]+)(?:\[\d+\])?(?=[,;])", body)
        found[name] = [one or two for one, two in fields]
    return found


def pairs():
    for ours, (theirs, fields) in STRUCTS.items():
        yield ours, theirs, fields
    yield from TWINS


def probe(changed=""):
    lines = ["#include <xla/ffi/api/c_api.h>", '#include "xla_ffi.h"', "#if XLA_FFI_API_MINOR >= 4"]
    lines += [f"#define XLA_FFI_{old} XLA_FFI_{new}" for old, new in RENAMED.items()] + ["#endif"]

    def same(left, right):
        lines.append(f'_Static_assert({left} == {right}, "{left}");')

    for ours, theirs, fields in pairs():
        for field, other in fields.items():
            same(f"offsetof(struct {ours}, {field})", f"offsetof(struct XLA_FFI_{theirs}, {other})")
            sizes = (
                f"sizeof(((struct {ours} *)0)->{field})",
                f"sizeof(((struct XLA_FFI_{theirs} *)0)->{other})",
            )
            if field not in PARTLY:
                same(*sizes)
    for ours, theirs in FILLED.items():
        same(f"sizeof(struct {ours})", f"sizeof(struct XLA_FFI_{theirs})")
    for ours, theirs in CONSTANTS.items():
        same(f"(int){ours}", f"(int)XLA_FFI_{theirs}")
    lines.append('_Static_assert(XLA_MINOR <= XLA_FFI_API_MINOR, "XLA_MINOR");')
    return "\n".join([*lines, changed, ""])


@pytest.fixture
def compiles(tmp_path):
    """Whether a probe passes the compiler, and what that says."""
    compiler, include = shutil.which("gcc"), Path(jax.ffi.include_dir())
    if compiler is None or not (include / "xla/ffi/api/c_api.h").is_file():
        pytest.skip("no gcc, or a jaxlib without xla/ffi/api/c_api.h")

    def run(text):
        (tmp_path / "probe.c").write_text(text)
        command = [compiler, "-std=c11", "-fsyntax-only", f"-I{include}", f"-I{NATIVE}", "probe.c"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode == 0, done.stderr

    return run


def test_layouts_and_values_are_xlas(compiles):
    good, said = compiles(probe())
    assert good, said


def test_the_probe_can_fail(compiles):
    wrong = '_Static_assert(offsetof(struct xla_frame, stage) == 0, "planted");'
    good, said = compiles(probe(wrong))
    assert not good and said.count("error") == 1 and "planted" in said


def test_everything_is_compared():
    declared = our_structs()
    assert set(declared) == set(STRUCTS)
    for name, fields in declared.items():
        compared = {field for ours, _, table in pairs() if ours == name for field in table}
        assert set(fields) == compared, name
    constants = set(re.findall(r"\b(XLA_[A-Z0-9_]+) = ", our_header()))
    assert constants == set(CONSTANTS) | {"XLA_MINOR"}
