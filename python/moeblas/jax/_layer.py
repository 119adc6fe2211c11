# SPDX-License-Identifier: Apache-2.0
"""The layer as a differentiable function of a dictionary of arrays.

Each direction is one custom call of XLA, in libmoeblas_xla.so, for CPU and CUDA. The call carries
the configuration itself, so compiled programs may be cached or sent elsewhere; all memory, the
workspace included, is XLA's.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import _lib
from .._structs import Backend, Balance, Config, Entry

_NO_GRADIENT = {"given_ids", "row_offset", "padding_mask", "token_count", "global_counts"}
_NO_GRADIENT |= {"correction_bias"}
# Inputs of the forward call alone.
_NOT_KEPT = ("given_ids", "global_counts")


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
            stages = {"execute": handler}
            if (
                platform == "CUDA"
            ):  # on the CPU there is no such stage, and no capture to be ready for
                stages["initialize"] = handler
            jax.ffi.register_ffi_target(f"moeblas_{name}", stages, platform=platform)
    return native


_native = _load()


def sizes(config: bytes, backend: Backend, tokens: int) -> tuple[int, int]:
    """Bytes of workspace and of what forward saves, from the plan that the handlers will use.

    Raises what the library says of the configuration.
    """
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
        raise _lib.error_of(status, text.value.decode())
    return workspace.value, saved.value


@functools.cache
def _has_cuda() -> bool:
    """Whether programs of this process may be compiled for CUDA."""
    try:
        return bool(jax.devices("cuda")) and _lib.backend_available(Backend.CUDA) is None
    except RuntimeError:
        return False


def _sizes_on(backend: Backend, config: bytes, tokens: int) -> tuple[int, int]:
    """Sizes of one platform's branch of a program.

    Where there is a GPU, ``sm_limit`` counts multiprocessors, of which the CPU, which is asked all
    the same, may have fewer; its workspace is the largest without a limit.
    """
    if backend == Backend.CPU and _has_cuda():
        parsed = Config.from_buffer_copy(config)
        parsed.sm_limit = 0
        config = bytes(parsed)
    return sizes(config, backend, tokens)


def _run(
    name: str,
    config: bytes,
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """One custom call, arrays by the names of moeblas.h. Its last result is the workspace."""
    tokens = operands["x"].shape[0]

    def on(backend: Backend, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Without a CUDA device there is no plan to ask; a program for one is refused when it runs.
        known = backend == Backend.CPU or _has_cuda()
        workspace = _sizes_on(backend, config, tokens)[0] if known else 0
        shapes = dict(results, workspace=jax.ShapeDtypeStruct((workspace,), jnp.uint8))
        in_place = {
            i: list(shapes).index(operand)
            for i, operand in enumerate(operands)
            if operand in shapes
        }
        call = jax.ffi.ffi_call(
            f"moeblas_{name}", tuple(shapes.values()), input_output_aliases=in_place
        )
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
    if parsed.entry in (Entry.HIDDEN, Entry.LOGITS):
        results["topk_ids"] = jax.ShapeDtypeStruct(slots, jnp.int32)
        results["topk_weights"] = jax.ShapeDtypeStruct(slots, jnp.float32)
        results["counts"] = jax.ShapeDtypeStruct((parsed.experts,), jnp.int32)
        results["losses"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    if "global_counts" in arrays:
        results["global_counts"] = _like(arrays["global_counts"])
    if keep:
        saved = _sizes_on(Backend.CPU, config, slots[0])[1]  # the same on every back end
        results["saved"] = jax.ShapeDtypeStruct((saved,), jnp.uint8)
    return _run("forward", config, arrays, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(config: bytes, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """``out``; with a router also ``losses``, and without gradients ``topk_ids``, ``topk_weights``,
    ``counts``; ``global_counts`` where they are given.
    """
    return _forward(config, _first_x(arrays), keep=False)


def _first_x(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The handlers take the number of tokens from the first operand; JAX sorts by key."""
    return {"x": arrays["x"], **arrays}


def _gradient(name: str, arrays: Mapping[str, jax.Array]) -> jax.ShapeDtypeStruct:
    """As the library writes it: that of a float32 router weight is of x's type like the others."""
    dtype = arrays["x"].dtype if name == "router_weight" else arrays[name].dtype
    return jax.ShapeDtypeStruct(arrays[name].shape, dtype)


def _instantiated(cotangent: jax.Array | SymbolicZero) -> jax.Array:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _has_losses(config: bytes) -> bool:
    router = Config.from_buffer_copy(config).router
    return router.balance != Balance.NONE or router.z_coeff != 0


def _layer_forward(config: bytes, arrays: dict) -> tuple[dict, tuple]:
    values = _first_x({name: primal.value for name, primal in arrays.items()})
    wanted = {name: () for name, primal in arrays.items() if primal.perturbed}
    results = _forward(config, values, keep=True)
    saved = results.pop("saved")
    return results, (values, saved, wanted)


def _layer_backward(config: bytes, kept: tuple, cotangents: dict) -> tuple[dict]:
    arrays, saved, wanted = kept
    operands = {name: array for name, array in _first_x(arrays).items() if name not in _NOT_KEPT}
    operands |= {"dout": _instantiated(cotangents["out"]), "saved": saved}
    if _has_losses(config):
        operands["dlosses"] = _instantiated(cotangents["losses"])
    results = {f"d{name}": _gradient(name, arrays) for name in wanted if name not in _NO_GRADIENT}
    grads = _run("backward", config, operands, results)
    grads = {name: grad.astype(arrays[name[1:]].dtype) for name, grad in grads.items()}
    return ({name: grads.get(f"d{name}") for name in arrays},)


_layer.defvjp(_layer_forward, _layer_backward, symbolic_zeros=True)
run_layer = jax.jit(_layer, static_argnums=0)
