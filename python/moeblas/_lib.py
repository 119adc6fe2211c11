# SPDX-License-Identifier: Apache-2.0
"""libmoeblas.so by ctypes: its functions, its errors as exceptions, two classes for its objects.

``Context`` is a back end on a device, ``Plan`` a checked configuration; a plan runs on raw
addresses (ints), which is what NumPy, PyTorch and JAX have in common. Nothing here copies,
allocates arrays or touches a device by itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from enum import IntEnum
from functools import cache

from ._structs import (
    ENUMS,
    VERSION,
    ActDesc,
    Backend,
    BackwardArgs,
    Config,
    Dtype,
    ForwardArgs,
    ParamGrads,
    Params,
    Status,
)

_SIZE_MAX = c_size_t(-1).value


class Error(Exception):
    """A call of the library failed; the text is its sentence, ``status`` says of which kind."""

    status = Status.ERROR_INTERNAL


class ArgumentError(Error, ValueError):
    """A size, a flag or a pointer that makes no sense."""

    status = Status.ERROR_ARGUMENT


class UnsupportedError(Error, NotImplementedError):
    """It makes sense, but this back end or build does not do it."""

    status = Status.ERROR_UNSUPPORTED


class WorkspaceError(Error, ValueError):
    """A workspace or saved buffer is missing or too small."""

    status = Status.ERROR_WORKSPACE


class OutOfMemoryError(Error, MemoryError):
    """Host memory could not be had."""

    status = Status.ERROR_MEMORY


class DeviceError(Error, RuntimeError):
    """The device or its driver reported an error."""

    status = Status.ERROR_DEVICE


class InternalError(Error, RuntimeError):
    """A bug of moeblas."""

    status = Status.ERROR_INTERNAL


_ERRORS = {kind.status: kind for kind in Error.__subclasses__()}


def error_of(status: int, sentence: str) -> Error:
    """The exception that a status other than OK stands for."""
    return _ERRORS.get(status, InternalError)(sentence)


def _check(status: int, *_: object) -> int:
    """ctypes' errcheck: turns a status into an exception with the library's sentence."""
    if status:
        raise error_of(status, lib.moe_last_error().decode())
    return status


_STATUS = object()  # marks a function whose result goes through _check
# name -> (result, arguments), as in moeblas.h. A stream is the address of a CUstream_st.
PROTOTYPES = {
    "moe_last_error": (c_char_p, []),
    "moe_status_name": (c_char_p, [c_int]),
    "moe_version": (c_char_p, []),
    "moe_context_create": (_STATUS, [POINTER(c_void_p), c_int, c_int]),
    "moe_context_destroy": (None, [c_void_p]),
    "moe_context_backend": (c_int, [c_void_p]),
    "moe_context_units": (c_int, [c_void_p]),
    "moe_backend_available": (_STATUS, [c_int]),
    "moe_plan_create": (_STATUS, [POINTER(c_void_p), c_void_p, POINTER(Config)]),
    "moe_plan_destroy": (None, [c_void_p]),
    "moe_plan_workspace": (c_size_t, [c_void_p, c_int64]),
    "moe_plan_saved": (c_size_t, [c_void_p, c_int64]),
    "moe_warmup": (_STATUS, [c_void_p, c_void_p]),
    "moe_plan_describe": (c_size_t, [c_void_p, c_int64, c_char_p, c_size_t]),
    "moe_forward": (_STATUS, [c_void_p, POINTER(ForwardArgs), c_void_p]),
    "moe_backward": (_STATUS, [c_void_p, POINTER(BackwardArgs), c_void_p]),
    "moe_activation_name": (c_char_p, [c_int, c_int]),
    "moe_activation_find": (_STATUS, [c_char_p, POINTER(c_int), POINTER(c_int)]),
    "moe_dtype_name": (c_char_p, [c_int]),
    "moe_dtype_bytes": (c_size_t, [c_int]),
}


def _path() -> str:
    """Where the library is: MOEBLAS_LIBRARY if set, else beside this file."""
    given = os.environ.get("MOEBLAS_LIBRARY")
    path = given or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libmoeblas.so")
    if not os.path.isfile(path):
        what = "MOEBLAS_LIBRARY" if given else "the package's library"
        raise ImportError(
            f"moeblas: {what} = {path}, which is no file; wanted a libmoeblas.so: install the"
            " wheel that `make wheel` builds, or set MOEBLAS_LIBRARY to what `make lib` builds"
        )
    return path


def _load(path: str) -> ctypes.CDLL:
    """The library with its prototypes declared; refused if it is not of this package's version."""
    try:
        loaded = ctypes.CDLL(path)
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = c_int if result is _STATUS else result
            if result is _STATUS:
                function.errcheck = _check
    except (OSError, AttributeError) as error:
        raise ImportError(f"moeblas: {path} cannot be loaded: {error}") from None
    found = loaded.moe_version().decode()
    if found.split(".")[:2] != [str(part) for part in VERSION[:2]]:
        wanted = ".".join(map(str, VERSION[:2]))
        raise ImportError(f"moeblas: {path} is version {found}, wanted {wanted}.x")
    return loaded


library_path = _path()
lib = _load(library_path)


def version() -> str:
    """Version of the library that is loaded, as "0.1.0"."""
    return lib.moe_version().decode()


def backend_available(backend: Backend | str) -> str | None:
    """None if the back end could be used here, else the sentence that says why not."""
    try:
        lib.moe_backend_available(_enum("backend", Backend, backend))
    except Error as error:
        return str(error)
    return None


def dtype_bytes(dtype: Dtype | str) -> int:
    """Bytes of one element."""
    return lib.moe_dtype_bytes(_enum("dtype", Dtype, dtype))


# ---- configuration


def _enum(field: str, kind: type[IntEnum], value: object) -> int:
    """The value of an enumeration given by name ("bf16") or number; refuses unknown names."""
    if not isinstance(value, str):
        return value  # type: ignore[return-value]
    try:
        return kind[value.upper()]
    except KeyError:
        names = ", ".join(member.name.lower() for member in kind)
        raise ArgumentError(f'{field} = "{value}", wanted one of {names}') from None


def _set_activation(act: ActDesc, name: str) -> None:
    """Takes "swiglu" (gated silu), "silu" (not gated) or any other name of moeblas_act.def."""
    kind, gated = c_int(), c_int()
    lib.moe_activation_find(name.encode(), byref(kind), byref(gated))
    act.kind, act.gated = kind.value, gated.value


def _fill(target: ctypes.Structure, prefix: str, fields: Mapping[str, object]) -> None:
    """Sets fields by name; whatever does not fit its field is refused rather than cut off."""
    known = [field[0] for field in target._fields_ if field[0] != "size"]
    enums = ENUMS[type(target)]
    for name, value in fields.items():
        if name not in known:
            raise ArgumentError(
                f"config: {prefix}{name} is unknown, wanted one of {', '.join(known)}"
            )
        held = getattr(target, name)
        if isinstance(held, ctypes.Structure):
            _fill_nested(held, f"{prefix}{name}.", value)
            continue
        if name in enums:
            value = _enum(f"config: {prefix}{name}", enums[name], value)
        try:
            setattr(target, name, value)
        except TypeError:
            raise ArgumentError(f"config: {prefix}{name} = {value!r}, wanted a number") from None
        if isinstance(held, int) and getattr(target, name) != value:
            raise ArgumentError(f"config: {prefix}{name} = {value}, which its field cannot hold")


def _fill_nested(target: ctypes.Structure, prefix: str, value: object) -> None:
    """A nested descriptor: a mapping of its fields, or the name of an activation."""
    fields = dict(value) if isinstance(value, Mapping) else {"kind": value}
    if isinstance(target, ActDesc):
        if isinstance(fields.get("kind"), str):
            _set_activation(target, fields.pop("kind"))
    elif not isinstance(value, Mapping):
        raise ArgumentError(f"config: {prefix[:-1]} = {value!r}, wanted a mapping of its fields")
    _fill(target, prefix, fields)


def make_config(**fields: object) -> Config:
    """A ``moe_config`` from keywords named as in moeblas.h.

    Enumerations may be given by their lower-case name (``dtype="bf16"``, ``entry="ids"``). ``act``
    is a name ("swiglu", "silu", ...) or a mapping whose ``kind`` is one (``{"kind": "swiglu",
    "gate_max": 7}``); ``router`` is a mapping (``{"score": "sigmoid", "renormalize": True}``).
    Raises ArgumentError for unknown names and values that do not fit; whether the configuration
    makes sense is for ``Plan`` to say.
    """
    config = Config()
    _fill(config, "", fields)
    return config


def param_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that a layer of this configuration can have, by name."""
    halves = 2 if c.act.gated else 1
    inter, shared, width = halves * c.inter, halves * c.shared_inter, c.latent or c.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "router_weight": (c.experts, c.hidden),
        "router_bias": (c.experts,),
        "correction_bias": (c.experts,),
        "b1": (c.experts, inter),
        "b2": (c.experts, width),
        "shared_gate": (c.hidden,),
    }
    matrices: dict[str, tuple[int, ...]] = {
        "w1": (c.experts, inter, width),
        "w2": (c.experts, width, c.inter),
        "shared_w1": (shared, c.hidden),
        "shared_w2": (c.hidden, c.shared_inter),
        "latent_down": (c.latent, c.hidden),
        "latent_up": (c.hidden, c.latent),
    }
    for name, (*experts, rows, columns) in matrices.items():
        shapes[name] = (*experts, columns, rows) if c.transposed else (*experts, rows, columns)
    return shapes


def _with_dtypes(config: Config) -> Config:
    """A copy in which the formats left at their default are those that the library takes."""
    c = Config.from_buffer_copy(config)
    c.dtype = c.dtype or Dtype.BF16
    c.logits_dtype = c.logits_dtype or Dtype.FP32
    c.router_dtype = c.router_dtype or c.dtype
    c.grad_dtype = c.grad_dtype or c.dtype
    return c


# ---- objects


class Context:
    """A back end on one device.

    ``device`` is a CUDA ordinal, for the CPU a number of threads (0: all). ``Context.get`` gives a
    shared one, which is what bindings want. Raises UnsupportedError if the back end is not in this
    build or finds no device.
    """

    def __init__(self, backend: Backend | str = Backend.CPU, device: int = 0) -> None:
        handle = c_void_p()
        lib.moe_context_create(byref(handle), _enum("backend", Backend, backend), device)
        self.handle: int = handle.value or 0
        self.backend = Backend(lib.moe_context_backend(self.handle))
        self.units: int = lib.moe_context_units(self.handle)  # threads, or multiprocessors
        self._destroy = weakref.finalize(self, lib.moe_context_destroy, self.handle)

    @staticmethod
    def get(backend: Backend | str = Backend.CPU, device: int = 0) -> Context:
        """The context of this back end and device, made at the first call and kept."""
        with _context_lock:
            return _cached_context(_enum("backend", Backend, backend), device)


_context_lock = threading.Lock()


@cache
def _cached_context(backend: int, device: int) -> Context:
    return Context(Backend(backend), device)


class Plan:
    """A checked configuration on a context. Immutable; threads may share it, each with a workspace.

    ``config`` is a ``Config`` or a mapping for ``make_config``. Raises ArgumentError or
    UnsupportedError with the library's reason.
    """

    def __init__(self, context: Context, config: Config | Mapping[str, object]) -> None:
        given = config if isinstance(config, Config) else make_config(**config)
        handle = c_void_p()
        lib.moe_plan_create(byref(handle), context.handle, byref(given))
        self.handle: int = handle.value or 0
        self.context = context  # must outlive the plan
        self.config = _with_dtypes(given)
        self._destroy = weakref.finalize(self, lib.moe_plan_destroy, self.handle)

    def _bytes(self, what: str, tokens: int) -> int:
        found = _SIZE_MAX
        if 0 <= tokens < 1 << 31:
            found = getattr(lib, f"moe_plan_{what}")(self.handle, tokens)
        if found == _SIZE_MAX:
            raise ArgumentError(
                f"{what}: tokens = {tokens}, wanted 0 or more with tokens * topk below 2^31"
            )
        return found

    def workspace(self, tokens: int) -> int:
        """Scratch bytes that a run call of up to ``tokens`` tokens needs. Grows with tokens."""
        return self._bytes("workspace", tokens)

    def saved(self, tokens: int) -> int:
        """Bytes that ``forward`` leaves for ``backward``. Grows with tokens."""
        return self._bytes("saved", tokens)

    def warmup(self, stream: int | None = None) -> None:
        """Loads what the back end would load lazily; call it before a capture."""
        lib.moe_warmup(self.handle, stream)

    def describe(self, tokens: int) -> str:
        """The plan as text, with the bytes that ``tokens`` tokens need."""
        length = lib.moe_plan_describe(self.handle, tokens, None, 0)
        text = ctypes.create_string_buffer(length + 1)
        lib.moe_plan_describe(self.handle, tokens, text, length + 1)
        return text.value.decode()

    def forward(self, params: Params, stream: int | None = None, **fields: int | None) -> None:
        """Runs ``moe_forward``.

        ``fields`` are those of ``moe_forward_args`` but size and params: addresses as ints (None:
        NULL), tokens, and the sizes of the buffers. The caller keeps the memory alive until the
        stream has done the work. Raises ArgumentError or WorkspaceError before anything is written.
        """
        args = ForwardArgs(params=ctypes.pointer(params), **fields)
        lib.moe_forward(self.handle, byref(args), stream)

    def backward(
        self,
        params: Params,
        grads: ParamGrads | None,
        stream: int | None = None,
        **fields: float | None,
    ) -> None:
        """Runs ``moe_backward``; as ``forward``. ``grads`` has the addresses of those wanted."""
        wanted = ctypes.pointer(grads) if grads is not None else None
        args = BackwardArgs(params=ctypes.pointer(params), grads=wanted, **fields)
        lib.moe_backward(self.handle, byref(args), stream)
