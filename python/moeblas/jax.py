# SPDX-License-Identifier: Apache-2.0
"""The layer in JAX: ``experts`` (routing given) and ``moe`` (router inside), under ``jit`` and ``grad``.

Each direction of the layer is one custom call of XLA, in libmoeblas_xla.so, for CPU and CUDA. The call carries the
configuration itself, so compiled programs may be cached or sent elsewhere; all memory is XLA's.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import _lib
from ._lib import ArgumentError, make_config
from ._structs import Backend, Config

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_NO_GRADIENT = ("given_ids", "padding_mask", "correction_bias")


class Aux(NamedTuple):
    """What ``moe`` decided. Only the two losses carry gradients."""

    ids: jax.Array  #: [T,k] int32, the chosen experts; -1 where masked
    weights: jax.Array  #: [T,k] float32
    counts: jax.Array  #: [E] int32, slots that chose each expert, before capacity drops
    balance_loss: jax.Array  #: float32, balance_coeff included; 0 without ``balance``
    z_loss: jax.Array  #: float32, z_coeff included


# ---- the native side


def _load() -> ctypes.CDLL:
    """libmoeblas_xla.so beside the library that is loaded, its handlers made known to XLA."""
    path = os.path.join(os.path.dirname(_lib.library_path), "libmoeblas_xla.so")
    if not os.path.isfile(path):
        raise ImportError(
            f"moeblas.jax: {path} is no file, wanted the handlers beside libmoeblas.so"
        )
    native = ctypes.CDLL(path)
    for name in ("forward", "backward"):
        for platform, suffix in (("cpu", "cpu"), ("CUDA", "cuda")):
            handler = jax.ffi.pycapsule(getattr(native, f"moe_xla_{name}_{suffix}"))
            # XLA on the CPU knows no initialize stage.
            stages = (
                {"execute": handler}
                if suffix == "cpu"
                else {"initialize": handler, "execute": handler}
            )
            jax.ffi.register_ffi_target(f"moeblas_{name}", stages, platform=platform)
    return native


_native = _load()


def _sizes(config: bytes, backend: Backend, tokens: int) -> tuple[int, int]:
    """Bytes of workspace and of what forward saves, from the plan that the handlers will use."""
    workspace, saved = ctypes.c_size_t(), ctypes.c_size_t()
    text = ctypes.create_string_buffer(512)
    status = _native.moe_xla_sizes(
        config,
        ctypes.c_size_t(len(config)),
        int(backend),
        0,
        ctypes.c_int64(tokens),
        ctypes.byref(workspace),
        ctypes.byref(saved),
        text,
    )
    if status:
        kinds = {kind.status: kind for kind in _lib.Error.__subclasses__()}
        raise kinds.get(status, _lib.InternalError)(text.value.decode())
    return workspace.value, saved.value


@functools.cache
def _has_cuda() -> bool:
    """Whether programs of this process may be compiled for CUDA."""
    try:
        return bool(jax.devices("cuda")) and _lib.backend_available(Backend.CUDA) is None
    except RuntimeError:
        return False


def _run(
    name: str,
    config: bytes,
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """One custom call, arrays by the names of moeblas.h. The workspace is one more result, which is dropped."""
    tokens = operands["x"].shape[0]

    def on(backend: Backend, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Without a CUDA device there is no plan to ask; a program compiled for one is refused by its handler.
        known = backend == Backend.CPU or _has_cuda()
        workspace = _sizes(config, backend, tokens)[0] if known else 0
        shapes = dict(results, workspace=jax.ShapeDtypeStruct((workspace,), jnp.uint8))
        call = jax.ffi.ffi_call(f"moeblas_{name}", tuple(shapes.values()))
        found = call(
            *arrays,
            config=np.frombuffer(config, np.uint8),
            operands=" ".join(operands),
            results=" ".join(shapes),
        )
        return tuple(found[:-1])

    @jax.custom_batching.custom_vmap
    def layer(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.platform_dependent(
            *arrays,
            cpu=functools.partial(on, Backend.CPU),
            cuda=functools.partial(on, Backend.CUDA),
        )

    @layer.def_vmap
    def refuse(axis_size: int, in_batched: object, *arrays: jax.Array) -> None:
        raise NotImplementedError(
            f"moeblas.jax: vmap over {axis_size} calls of the layer, wanted one call: reshape x to"
            " [batch * tokens, hidden]"
        )

    return dict(zip(results, layer(*operands.values())))


# ---- the layer and its gradient


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _forward(config: bytes, arrays: Mapping[str, jax.Array], keep: bool) -> dict[str, jax.Array]:
    parsed = Config.from_buffer_copy(config)
    slots = (arrays["x"].shape[0], parsed.topk)
    results = {"out": _like(arrays["x"])}
    if "router_weight" in arrays:
        results["topk_ids"] = jax.ShapeDtypeStruct(slots, jnp.int32)
        results["topk_weights"] = jax.ShapeDtypeStruct(slots, jnp.float32)
        results["counts"] = jax.ShapeDtypeStruct((parsed.experts,), jnp.int32)
    if keep:
        saved = _sizes(config, Backend.CPU, slots[0])[1]  # the same on every back end
        results["saved"] = jax.ShapeDtypeStruct((saved,), jnp.uint8)
    return _run("forward", config, arrays, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(config: bytes, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return _forward(config, _first_x(arrays), keep=False)


def _first_x(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The handlers take the number of tokens from the first operand; JAX sorts dictionaries by key."""
    return {"x": arrays["x"], **arrays}


def _layer_forward(config: bytes, arrays: dict) -> tuple[dict, tuple]:
    values = _first_x({name: primal.value for name, primal in arrays.items()})
    wanted = {name: () for name, primal in arrays.items() if primal.perturbed}
    results = _forward(config, values, keep=True)
    return results, (values, results.pop("saved"), wanted)


def _layer_backward(config: bytes, kept: tuple, cotangents: dict) -> tuple[dict]:
    arrays, saved, wanted = kept
    dout = cotangents["out"]
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    operands = {k: v for k, v in _first_x(arrays).items() if k != "given_ids"}
    results = {f"d{name}": _like(arrays[name]) for name in wanted if name not in _NO_GRADIENT}
    grads = _run("backward", config, dict(operands, dout=dout, saved=saved), results)
    return ({name: grads.get(f"d{name}") for name in arrays},)


_layer.defvjp(_layer_forward, _layer_backward, symbolic_zeros=True)
_jit_layer = jax.jit(_layer, static_argnums=0)


# ---- arguments


def _array(name: str, array: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Refuses an array that is not of the shape and type the layer needs."""
    if not hasattr(array, "dtype"):
        array = jnp.asarray(array)
    if array.shape != shape or array.dtype != dtype:
        found = f"{array.dtype}{list(array.shape)}"
        raise ArgumentError(f"moeblas.jax: {name} is {found}, wanted {dtype}{list(shape)}")
    return array


def _sizes_of(x: jax.Array, w2: jax.Array, transposed: bool) -> tuple[int, int, int, int]:
    """tokens, hidden, experts, inter; refuses what has not these dimensions."""
    if x.ndim != 2 or str(x.dtype) not in _DTYPES:
        wanted = "[tokens,hidden] of float32, bfloat16 or float16"
        raise ArgumentError(f"moeblas.jax: x is {x.dtype}{list(x.shape)}, wanted {wanted}")
    if w2.ndim != 3:
        wanted = "[experts,inter,hidden]" if transposed else "[experts,hidden,inter]"
        raise ArgumentError(f"moeblas.jax: w2 is {w2.dtype}{list(w2.shape)}, wanted {wanted}")
    return x.shape[0], x.shape[1], w2.shape[0], w2.shape[1 if transposed else 2]


def _linear(outputs: int, inputs: int, transposed: bool) -> tuple[int, int]:
    return (inputs, outputs) if transposed else (outputs, inputs)


def _ids(ids: jax.Array, shape: tuple[int, ...], experts: int) -> jax.Array:
    """Expert ids as int32; what is no expert stays none, however far out it is."""
    ids = jnp.asarray(ids)
    if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ArgumentError(
            f"moeblas.jax: ids is {ids.dtype}{list(ids.shape)}, wanted integers [tokens,topk] = {list(shape)}"
        )
    return ids if ids.dtype == jnp.int32 else jnp.clip(ids, -1, experts).astype(jnp.int32)


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    *,
    act: str = "swiglu",
    layout: str = "concat_gate_first",
    interleave: int = 0,
    transposed: bool = False,
    weight_on_input: bool = False,
    recompute: bool = False,
    alpha: float = 0.0,
    beta: float = 0.0,
    gate_max: float = 0.0,
    up_min: float = 0.0,
    up_max: float = 0.0,
    up_offset: float = 0.0,
    up_beta: float = 0.0,
) -> jax.Array:
    """The experts of a Mixture-of-Experts layer, for routing that is given.

    x [T,H] of float32, bfloat16 or float16; ids [T,k] integers, those outside [0,E) are skipped; weights [T,k] floats,
    used in float32. With U = 2F for gated activations, else F: w1 [E,U,H], w2 [E,H,F], or with ``transposed`` [E,H,U]
    and [E,F,H]; b1 [E,U], b2 [E,H]; all of x's type. Returns out [T,H] of x's type, differentiable in all but ids.

    ``act`` is a name of moeblas_act.def, the rest are the fields of moe_act_desc and moe_config; 0 is the default.
    ``recompute`` keeps only the row map for the backward pass. Raises ArgumentError and UnsupportedError with the
    argument, what was found and what was wanted, while tracing. Under vmap: NotImplementedError.
    """
    x, w2 = jnp.asarray(x), jnp.asarray(w2)
    tokens, hidden, count, inter = _sizes_of(x, w2, transposed)
    ids = jnp.asarray(ids)
    topk = ids.shape[-1] if ids.ndim else 0
    weights = jnp.asarray(weights).astype(jnp.float32)
    config = make_config(
        hidden=hidden,
        inter=inter,
        experts=count,
        topk=topk,
        dtype=_DTYPES[str(x.dtype)],
        grad_dtype=_DTYPES[str(x.dtype)],
        entry="ids",
        act=dict(
            kind=act,
            layout=layout,
            interleave=interleave,
            alpha=alpha,
            beta=beta,
            gate_max=gate_max,
            up_min=up_min,
            up_max=up_max,
            up_offset=up_offset,
            up_beta=up_beta,
        ),
        weight_on_input=bool(weight_on_input),
        transposed=bool(transposed),
        recompute="h" if recompute else "none",
    )
    up = inter * (2 if config.act.gated else 1)
    arrays = {
        "x": x,
        "given_ids": _ids(ids, (tokens, topk), count),
        "given_weights": _array("weights", weights, (tokens, topk), jnp.dtype("float32")),
        "w1": _array("w1", w1, (count, *_linear(up, hidden, transposed)), x.dtype),
        "w2": _array("w2", w2, (count, *_linear(hidden, inter, transposed)), x.dtype),
    }
    if b1 is not None:
        arrays["b1"] = _array("b1", b1, (count, up), x.dtype)
    if b2 is not None:
        arrays["b2"] = _array("b2", b2, (count, hidden), x.dtype)
    return _jit_layer(bytes(config), arrays)["out"]
