# SPDX-License-Identifier: Apache-2.0
"""The layer on NumPy arrays, on the CPU: forward and backward, for checking and for small programs.

    layer = Layer(hidden=64, inter=32, experts=8, topk=2, act="swiglu")
    result = layer.forward(x, {"router_weight": wr, "w1": w1, "w2": w2})
    grads = layer.backward(result, dout)        # grads.x, grads.params["w1"], ...

Arrays are those of moeblas.h, with its names and shapes. bf16 is uint16 that holds the bits (see
``to_bf16``), or ``ml_dtypes.bfloat16`` where a program uses that. Every shape and type is checked
here, since the library sees only addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._lib import ArgumentError, Context, Plan, make_config, param_shapes
from ._structs import Balance, Dtype, Entry, ParamGrads, Params

Array = NDArray[np.generic]
Shape = tuple[int, ...]

_PLAIN = {Dtype.FP32: "float32", Dtype.BF16: "uint16", Dtype.FP16: "float16"}
_FP32_PARAMS = ("router_bias", "correction_bias")


def to_bf16(x: ArrayLike) -> NDArray[np.uint16]:
    """The bits of numbers rounded to bf16, to nearest even; NaN stays NaN. Same shape."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), quiet, rounded)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers that bf16 bits stand for, exactly. Same shape."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass
class Result:
    """What ``Layer.forward`` computed; None where the layer has no such thing.

    ``topk_ids`` [T,k] int32, ``topk_weights`` [T,k], ``counts`` [E] int32 and ``losses`` [2]
    (balancing loss, z-loss) are of layers with a router; ``out`` is [T,H].
    """

    out: Array
    topk_ids: NDArray[np.int32] | None = None
    topk_weights: NDArray[np.float32] | None = None
    counts: NDArray[np.int32] | None = None
    slot_row: NDArray[np.int32] | None = None
    losses: NDArray[np.float32] | None = None
    saved: NDArray[np.uint8] | None = field(default=None, repr=False)
    inputs: dict[str, Array] = field(default_factory=dict, repr=False)
    params: dict[str, Array] = field(default_factory=dict, repr=False)


@dataclass
class Grads:
    """Gradients: ``x`` [T,H], ``logits`` [T,E], ``topk_weights`` (as given), ``params`` by name."""

    x: Array
    logits: Array | None = None
    topk_weights: NDArray[np.float32] | None = None
    params: dict[str, Array] = field(default_factory=dict)


class Layer:
    """A Mixture-of-Experts layer on the CPU.

    ``config`` is that of ``moeblas.make_config``: hidden, inter, experts, topk, act, router, entry
    and so on. Raises ArgumentError or UnsupportedError with the library's reason. A layer is
    immutable: the parameters are given at each call, and threads may share it.
    """

    def __init__(self, *, threads: int = 0, dtype: Dtype | str = "fp32", **config: object) -> None:
        self.plan = Plan(Context.get("cpu", threads), make_config(dtype=dtype, **config))
        self.config = self.plan.config
        self._routed = self.config.entry in (Entry.HIDDEN, Entry.LOGITS)
        self.shapes = param_shapes(self.config)

    def _param_dtype(self, name: str) -> Dtype:
        if name in _FP32_PARAMS:
            return Dtype.FP32
        return Dtype(self.config.router_dtype if name == "router_weight" else self.config.dtype)

    def _check_params(self, params: Mapping[str, ArrayLike]) -> dict[str, Array]:
        for name in params:
            if name not in self.shapes:
                raise ArgumentError(
                    f"forward: params.{name} is unknown, wanted {', '.join(self.shapes)}"
                )
        return {
            name: _take(
                f"forward: params.{name}", value, self.shapes[name], self._param_dtype(name)
            )
            for name, value in params.items()
            if value is not None
        }

    def _check_inputs(self, given: Mapping[str, ArrayLike | None], tokens: int) -> dict[str, Array]:
        """The arrays of a forward call but x, checked; those that are None are left out."""
        c = self.config
        slots = (tokens,) if c.entry == Entry.ROWS else (tokens, c.topk)
        wanted: dict[str, tuple[Shape, Dtype | str]] = {
            "logits": ((tokens, c.experts), Dtype(c.logits_dtype)),
            "given_ids": ((tokens, c.topk), "int32"),
            "given_weights": (slots, "float32"),
            "row_offset": ((c.experts + 1,), "int32"),
            "padding_mask": ((tokens,), "uint8"),
            "token_count": ((1,), "int32"),
            "global_counts": ((c.experts + 1,), "int64"),
        }
        return {
            name: _take(f"forward: {name}", value, *wanted[name], in_place=name == "global_counts")
            for name, value in given.items()
            if value is not None
        }

    def forward(
        self,
        x: ArrayLike,
        params: Mapping[str, ArrayLike],
        *,
        logits: ArrayLike | None = None,
        given_ids: ArrayLike | None = None,
        given_weights: ArrayLike | None = None,
        row_offset: ArrayLike | None = None,
        padding_mask: ArrayLike | None = None,
        token_count: ArrayLike | None = None,
        global_counts: NDArray[np.int64] | None = None,
        save: bool = True,
    ) -> Result:
        """Runs the layer on ``x`` [T,H]; ``self.shapes`` has the shapes of the parameters.

        The other arrays are those of ``moe_forward_args``: logits [T,E], given_ids [T,k] int32,
        given_weights [T,k] fp32, row_offset [E+1] int32, padding_mask [T] bool or uint8;
        token_count is one integer, tokens from which on take no part and give 0 (not with
        ``entry="rows"``); global_counts [E+1] int64 is updated in place. ``save=False`` is
        inference: nothing is kept for ``backward``. Raises ArgumentError naming the argument that
        is wrong.
        """
        tokens = _tokens("forward", x)
        x = _take("forward: x", x, (tokens, self.config.hidden), Dtype(self.config.dtype))
        held = self._check_params(params)
        inputs = self._check_inputs(
            {
                "logits": logits,
                "given_ids": given_ids,
                "given_weights": given_weights,
                "row_offset": row_offset,
                "padding_mask": _as_bytes(padding_mask),
                "token_count": _as_count(token_count, tokens),
                "global_counts": global_counts,
            },
            tokens,
        )
        result = self._new_result(x, tokens)
        workspace = np.empty(self.plan.workspace(tokens), np.uint8)
        result.saved = np.empty(self.plan.saved(tokens), np.uint8) if save else None
        outputs = {name: getattr(result, name) for name in _OUTPUTS}
        self.plan.forward(
            Params(**_addresses(held)),
            tokens=tokens,
            saved_bytes=0 if result.saved is None else result.saved.nbytes,
            workspace_bytes=workspace.nbytes,
            **_addresses({"x": x, **inputs, **outputs, "workspace": workspace}),
        )
        result.inputs, result.params = {"x": x, **inputs}, held
        return result

    def _new_result(self, x: Array, tokens: int) -> Result:
        c = self.config
        result = Result(out=np.empty_like(x))
        if c.entry != Entry.ROWS:
            result.counts = np.empty(c.experts, np.int32)
            result.slot_row = np.empty((tokens, c.topk), np.int32)
        if self._routed:
            result.topk_ids = np.empty((tokens, c.topk), np.int32)
            result.topk_weights = np.empty((tokens, c.topk), np.float32)
            if c.router.balance != Balance.NONE or c.router.z_coeff != 0:
                result.losses = np.empty(2, np.float32)
        return result

    def backward(
        self,
        result: Result,
        dout: ArrayLike,
        *,
        loss_scale: float = 1,
        skip_losses: bool = False,
        into: Mapping[str, Array] | None = None,
    ) -> Grads:
        """Gradients of a loss of which ``dout`` [T,H] is the gradient with respect to the output.

        The inputs and parameters of the forward call must still hold what they held. The router's
        own losses are part of the loss, times ``loss_scale``, unless ``skip_losses``. ``into`` has
        arrays for the parameter gradients wanted, which are added to what is there; without it
        all are computed, in ``grad_dtype``. Raises ArgumentError naming the argument that is wrong.
        """
        if result.saved is None:
            raise ArgumentError("backward: result was computed with save=False, wanted save=True")
        x, tokens = result.inputs["x"], len(result.out)
        dout = _take("backward: dout", dout, x.shape, Dtype(self.config.dtype))
        inputs = {n: a for n, a in result.inputs.items() if n not in ("given_ids", "global_counts")}
        grads = Grads(x=np.empty_like(x), params=self._grad_arrays(result, into))
        if "logits" in inputs:
            grads.logits = np.empty_like(inputs["logits"])
        if not self._routed and "given_weights" in inputs:
            grads.topk_weights = np.empty_like(inputs["given_weights"])
        if self._routed:
            inputs.pop("given_weights", None)
        workspace = np.empty(self.plan.workspace(tokens), np.uint8)
        outputs = {"dx": grads.x, "dlogits": grads.logits, "dtopk_weights": grads.topk_weights}
        self.plan.backward(
            Params(**_addresses(result.params)),
            ParamGrads(**_addresses(grads.params)),
            tokens=tokens,
            loss_scale=loss_scale,
            skip_losses=int(skip_losses or loss_scale == 0),  # to the library, 0 means 1
            accumulate=int(into is not None),
            saved_bytes=result.saved.nbytes,
            workspace_bytes=workspace.nbytes,
            **_addresses({**inputs, **outputs, "dout": dout, "saved": result.saved}),
            workspace=_address(workspace),
        )
        return grads

    def _grad_arrays(self, result: Result, into: Mapping[str, Array] | None) -> dict[str, Array]:
        """The arrays for the parameter gradients: those given, checked, or new ones for all."""
        can = [name for name in result.params if name != "correction_bias"]
        if into is None:
            return {name: self._new_grad(name, result.params[name]) for name in can}
        for name in into:
            if name not in can:
                raise ArgumentError(f"backward: into.{name}, wanted some of {', '.join(can)}")
        return {
            name: _take(
                f"backward: into.{name}", array, self.shapes[name], self._grad_dtype(name), True
            )
            for name, array in into.items()
        }

    def _grad_dtype(self, name: str) -> Dtype:
        return Dtype.FP32 if name in _FP32_PARAMS else Dtype(self.config.grad_dtype)

    def _new_grad(self, name: str, param: Array) -> Array:
        dtype = self._grad_dtype(name)
        return np.empty_like(param) if _is(param, dtype) else np.empty(param.shape, _PLAIN[dtype])


_OUTPUTS = ("out", "topk_ids", "topk_weights", "counts", "slot_row", "losses", "saved")


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]


def _addresses(arrays: Mapping[str, Array | None]) -> dict[str, int]:
    return {name: _address(array) for name, array in arrays.items() if array is not None}


def _tokens(op: str, x: ArrayLike) -> int:
    if np.ndim(x) != 2:
        raise ArgumentError(f"{op}: x has {np.ndim(x)} dimensions, wanted 2: [tokens, hidden]")
    return np.shape(x)[0]


def _as_bytes(mask: ArrayLike | None) -> ArrayLike | None:
    mask = mask if mask is None else np.asarray(mask)
    return mask.view(np.uint8) if mask is not None and mask.dtype == np.bool_ else mask


def _as_count(count: ArrayLike | None, tokens: int) -> NDArray[np.int32] | None:
    """[1] int32 of its own, from one integer of any type and value."""
    if count is None:
        return None
    array = np.asarray(count)
    if not np.issubdtype(array.dtype, np.integer) or array.size != 1:
        found = f"{array.dtype}{list(array.shape)}"
        raise ArgumentError(f"forward: token_count is {found}, wanted one integer")
    return np.clip(array, 0, tokens).astype(np.int32).reshape(1)


def _is(array: Array, dtype: Dtype | str) -> bool:
    """Whether an array holds elements of this type; bf16 may also be ml_dtypes' own type."""
    plain = _PLAIN[dtype] if isinstance(dtype, Dtype) else dtype
    return array.dtype == plain or (dtype == Dtype.BF16 and array.dtype.name == "bfloat16")


def _take(
    what: str, value: ArrayLike, shape: Shape, dtype: Dtype | str, in_place: bool = False
) -> Array:
    """The array as the library wants it; copied where its memory has gaps or is not aligned."""
    array = np.asarray(value)
    if array.shape != shape:
        raise ArgumentError(f"{what}.shape = {array.shape}, wanted {shape}")
    if not _is(array, dtype):
        wanted = f"{_PLAIN[dtype]} ({dtype.name})" if isinstance(dtype, Dtype) else dtype
        raise ArgumentError(f"{what}.dtype = {array.dtype}, wanted {wanted}")
    if array.flags.c_contiguous and _address(array) % 16 == 0:
        if in_place and not array.flags.writeable:
            raise ArgumentError(f"{what} is read-only, wanted an array to write to")
        return array
    if in_place:
        raise ArgumentError(f"{what} has gaps or is not aligned to 16 bytes, wanted it as np.zeros")
    return array.copy()
