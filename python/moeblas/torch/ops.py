# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.moeblas.*``, for CPU and CUDA: strict, one call of the library each.

    forward       inputs -> [out, losses, topk_ids, topk_weights, counts, global_counts, saved]
                  as far as there are such; differentiable
    forward.out   the same for inference, into tensors of the caller
    backward      -> the gradients that `wanted` names, in the order of ``_layer.GRADS``
    backward.out  into tensors of the caller, written or accumulated, in fp32 if those are fp32

``options`` is the text that ``functional.options_text`` makes. All memory is torch's: outputs, the
buffer for backward and the workspace are tensors; work goes to the current stream; outputs never
alias inputs. Strided or misaligned inputs are copied first. ``moeblas.torch.experts`` and ``moe``
are the convenient way to these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import pointer
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import ArgumentError, ParamGrads, Params, UnsupportedError
from .._lib import lib
from .._structs import BackwardArgs, ForwardArgs
from ._layer import GRADS, PARAMS, ROUTING, Layer, find

Tensors = Sequence[Optional[Tensor]]

_INPUT_NAMES = ROUTING + PARAMS
_OF_TOKENS = frozenset(("logits", "ids", "weights", "padding_mask"))
_COUNTS = _INPUT_NAMES.index("global_counts")
# The fields of the arguments themselves; parameters have a struct of their own.
_FIELDS = {name: name for name in ROUTING} | {"ids": "given_ids", "weights": "given_weights"}
_REPORTS = ("losses", "topk_ids", "topk_weights", "counts")
# What backward reads of forward's inputs.
_KEPT = tuple(name for name in _INPUT_NAMES if name not in ("ids", "global_counts"))
_GRADS_IN_KEPT = [("x", *_KEPT).index(name) for name in GRADS]
_GRAD_FIELDS = {"x": "dx", "logits": "dlogits", "weights": "dtopk_weights"}


def _arguments(names: Sequence[str]) -> str:
    """The names as schema arguments."""
    return ", ".join(f"Tensor{'' if name in ('w1', 'w2') else '?'} {name}" for name in names)


def _results(names: Sequence[str]) -> str:
    """The names as optional outputs of the caller, each with an alias letter of its own."""
    return ", ".join(f"Tensor({chr(98 + i)}!)? {name}=None" for i, name in enumerate(names))


_INPUTS = _arguments(_INPUT_NAMES)
_COUNTED = _INPUTS.replace("Tensor? global_counts", "Tensor(z!)? global_counts")
_BACK = f"Tensor dout, Tensor? dlosses, Tensor x, {_arguments(_KEPT)}, Tensor saved, str options"
_OUTS = "Tensor(a!) out, " + _results(_REPORTS)
_GRAD_OUTS = _results(["d" + name for name in GRADS])
_SCHEMAS = (
    f"forward(Tensor x, {_INPUTS}, str options, bool save) -> Tensor[]",
    f"forward.out(Tensor x, {_COUNTED}, str options, *, {_OUTS}) -> ()",
    f"backward({_BACK}, bool[] wanted) -> Tensor[]",
    f"backward.out({_BACK}, bool accumulate, *, {_GRAD_OUTS}) -> ()",
)

library = torch.library.Library("moeblas", "FRAGMENT")
for _schema in _SCHEMAS:
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
forward = torch.ops.moeblas.forward.default
backward = torch.ops.moeblas.backward.default


# ---- what both directions need

# As MOE_PARAMS_INIT and the like. Every call copies them, so that threads share nothing.
_PARAMS_INIT, _GRADS_INIT = bytes(Params()), bytes(ParamGrads())
_FORWARD_INIT, _BACKWARD_INIT = bytes(ForwardArgs()), bytes(BackwardArgs())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _ready(tensor: Tensor) -> Tensor:
    """The tensor as the library reads it: contiguous and aligned to 16 bytes."""
    if tensor.is_contiguous() and not tensor.data_ptr() & 15:
        return tensor
    return _copy(tensor)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class _Call:
    """One call: its arguments, checked and with their addresses, and what keeps those alive."""

    __slots__ = ("_held", "args", "layer", "x")

    def __init__(
        self,
        args: ForwardArgs | BackwardArgs,
        x: Tensor,
        names: Sequence[str],
        tensors: Tensors,
        options: str,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        tokens = _tokens(x)
        params = Params.from_buffer_copy(_PARAMS_INIT)
        held, key = [], []
        for name, tensor in zip(names, tensors):
            if tensor is None:
                continue
            shape, address = tensor.shape, tensor.data_ptr()
            if address & 15 or not tensor.is_contiguous():
                tensor = _copy(tensor)
                address = tensor.data_ptr()
                held.append(tensor)
            field = _FIELDS.get(name)
            if field is None:
                setattr(params, name, address)
            else:
                setattr(args, field, address)
                if name in _OF_TOKENS:
                    _check_rows(name, shape, tokens)
                    shape = shape[1:]
            key.append((name, shape, tensor.dtype, tensor.get_device()))
        device = x.get_device()
        units = torch.get_num_threads() if device < 0 else 0
        self.layer = find(options, x.shape[1], x.dtype, device, units, grad_dtype, tuple(key))
        self.x = x = _ready(x)
        args.tokens, args.x, args.params = tokens, x.data_ptr(), pointer(params)
        self.args, self._held = args, held

    def run(self, function: Callable) -> None:
        """One call of the library, on the current stream; the current device stays what it is."""
        args, x, plan = self.args, self.x, self.layer.plan.handle
        size = self.layer.workspace(args.tokens)
        workspace = x.new_empty(size, dtype=torch.uint8)
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
        device = x.get_device()
        if device < 0:
            function(plan, args, None)
            return
        # torch.cuda.current_stream would make an object of Python's at each call.
        stream = torch._C._cuda_getCurrentRawStream(device)
        if device == torch._C._cuda_getDevice():
            function(plan, args, stream)
        else:
            with torch.cuda.device(device):
                function(plan, args, stream)


def _tokens(x: Tensor) -> int:
    if x.dim() != 2:
        raise ArgumentError(
            f"moeblas.torch: x has {x.dim()} dimensions, wanted 2: [tokens, hidden]"
        )
    return x.shape[0]


def _check_rows(name: str, shape: Sequence[int], tokens: int) -> None:
    """The number of tokens is no part of a layer's key."""
    if len(shape) == 0 or shape[0] != tokens:
        raise ArgumentError(
            f"moeblas.torch: {name} has shape {list(shape)}, wanted {tokens} rows as x"
        )


def _fake_layer(x: Tensor, options: str, tensors: Tensors) -> Layer:
    """The layer while tracing: sizes become numbers, and no device is touched."""
    _tokens(x)
    key = []
    for name, tensor in zip(_INPUT_NAMES, tensors):
        if tensor is not None:
            shape = tensor.shape[1:] if name in _OF_TOKENS else tensor.shape
            key.append((name, tuple(int(size) for size in shape), tensor.dtype, -1))
    return find(options, int(x.shape[1]), x.dtype, -1, 0, None, tuple(key))


def _check_output(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], x: Tensor
) -> None:
    """An output of the caller must be one that the library can write to directly."""
    fits = tensor.shape == tuple(shape) and tensor.dtype in dtypes and tensor.device == x.device
    if not fits or _ready(tensor) is not tensor:
        raise ArgumentError(
            f"moeblas.torch: {name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device},"
            f" wanted {list(shape)} {' or '.join(map(str, dtypes))} on {x.device},"
            " contiguous and aligned to 16 bytes"
        )


# ---- forward


def _forward_call(x: Tensor, tensors: Tensors, options: str) -> _Call:
    args = ForwardArgs.from_buffer_copy(_FORWARD_INIT)
    return _Call(args, x, _INPUT_NAMES, tensors, options)


def _run_forward(call: _Call, outputs: dict[str, Tensor]) -> None:
    """Runs moe_forward; ``outputs`` are named as in moe_forward_args."""
    args = call.args
    for name, tensor in outputs.items():
        setattr(args, name, tensor.data_ptr())
    if "saved" in outputs:
        args.saved_bytes = outputs["saved"].numel()
    call.run(lib.moe_forward)


def _reports(layer: Layer, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a router reports, in the op's order; the number of tokens may be symbolic."""
    if not layer.routed:
        return {}
    return {
        "losses": ((2,), torch.float32),
        "topk_ids": ((tokens, layer.topk), torch.int32),
        "topk_weights": ((tokens, layer.topk), torch.float32),
        "counts": ((layer.experts,), torch.int32),
    }


def _empty_outputs(layer: Layer, x: Tensor, counts: Tensor | None, save: bool) -> dict[str, Tensor]:
    outputs = {"out": _empty_like(x)}
    for name, (shape, dtype) in _reports(layer, x.shape[0]).items():
        outputs[name] = x.new_empty(shape, dtype=dtype)
    if counts is not None:
        outputs["global_counts"] = counts
    if save:
        outputs["saved"] = x.new_empty(layer.saved_bytes(x.shape[0]), dtype=torch.uint8)
    return outputs


def _forward(x: Tensor, *rest: object) -> list[Tensor]:
    *tensors, options, save = rest
    call = _forward_call(x, tensors, options)
    counts = tensors[_COUNTS]
    outputs = _empty_outputs(call.layer, x, counts if counts is None else _copy(counts), save)
    _run_forward(call, outputs)
    return list(outputs.values())


def _forward_fake(x: Tensor, *rest: object) -> list[Tensor]:
    *tensors, options, save = rest
    counts = tensors[_COUNTS]
    if counts is not None:
        counts = _empty_like(counts)
    return list(_empty_outputs(_fake_layer(x, options, tensors), x, counts, save).values())


def _forward_out(x: Tensor, *rest: object, **outputs: Tensor | None) -> None:
    *tensors, options = rest
    call = _forward_call(x, tensors, options)
    written = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    shapes = {"out": (x.shape, x.dtype), **_reports(call.layer, x.shape[0])}
    for name, tensor in written.items():
        if name not in shapes:
            raise ArgumentError(f"moeblas.torch: {name} is given, wanted None without a router")
        _check_output(name, tensor, shapes[name][0], (shapes[name][1],), x)
    counts = tensors[_COUNTS]
    if counts is not None:
        _check_output("global_counts", counts, counts.shape, (torch.int64,), x)
        written["global_counts"] = counts
    _run_forward(call, written)


# ---- backward


def _check_saved(dout: Tensor, x: Tensor, saved: Tensor) -> None:
    """dout must be like the output, `saved` what forward left; the library checks its size."""
    if dout.shape != x.shape or dout.dtype != x.dtype or dout.device != x.device:
        raise ArgumentError(
            f"moeblas.torch: dout is {list(dout.shape)} {dout.dtype} on {dout.device}, wanted"
            f" {list(x.shape)} {x.dtype} on {x.device} as x"
        )
    if saved.dtype != torch.uint8 or saved.device != x.device or _ready(saved) is not saved:
        raise ArgumentError("moeblas.torch: saved is not what forward returned with save = True")


def _run_backward(
    call: _Call,
    given: tuple[Tensor, Tensor | None, Tensor],
    grads: dict[str, Tensor],
    accumulate: bool,
) -> None:
    """Runs moe_backward on (dout, dlosses, saved); ``grads`` are named as their inputs."""
    dout, dlosses, saved = given
    args, x = call.args, call.x
    _check_saved(dout, x, saved)
    dout = _ready(dout)
    args.dout, args.accumulate = dout.data_ptr(), accumulate
    args.saved, args.saved_bytes = saved.data_ptr(), saved.numel()
    if dlosses is None or not call.layer.has_losses:
        args.skip_losses = 1
    else:
        dlosses = _ready(dlosses)
        _check_output("dlosses", dlosses, (2,), (torch.float32,), x)
        args.dlosses = dlosses.data_ptr()
    parameters = ParamGrads.from_buffer_copy(_GRADS_INIT)
    for name, tensor in grads.items():
        if name in _GRAD_FIELDS:
            setattr(args, _GRAD_FIELDS[name], tensor.data_ptr())
        else:
            setattr(parameters, name, tensor.data_ptr())
    args.grads = pointer(parameters)
    call.run(lib.moe_backward)


def _empty_grads(x: Tensor, kept: Tensors, wanted: Sequence[bool]) -> dict[str, Tensor]:
    """One tensor for each gradient wanted, like its input."""
    inputs = (x, *kept)
    grads = {}
    for name, at, want in zip(GRADS, _GRADS_IN_KEPT, wanted):
        if want and inputs[at] is None:
            raise ArgumentError(f"moeblas.torch: wanted has {name}, which was not given")
        if want:
            grads[name] = _empty_like(inputs[at])
    return grads


def _backward_call(
    x: Tensor, kept: Tensors, options: str, grad_dtype: torch.dtype | None = None
) -> _Call:
    args = BackwardArgs.from_buffer_copy(_BACKWARD_INIT)
    return _Call(args, x, _KEPT, kept, options, grad_dtype)


def _backward(dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object) -> list[Tensor]:
    *kept, saved, options, wanted = rest
    call = _backward_call(x, kept, options)
    grads = _empty_grads(x, kept, wanted)
    written, router = grads, grads.get("router_weight")
    if router is not None and router.dtype != x.dtype:  # the library writes it as the others
        written = {**grads, "router_weight": router.new_empty(router.shape, dtype=x.dtype)}
    _run_backward(call, (dout, dlosses, saved), written, False)
    if written is not grads:
        router.copy_(written["router_weight"])
    return list(grads.values())


def _backward_fake(dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object) -> list[Tensor]:
    *kept, _saved, _options, wanted = rest
    return list(_empty_grads(x, kept, wanted).values())


def _check_grads(x: Tensor, kept: Tensors, written: dict[str, Tensor]) -> torch.dtype | None:
    """The caller's gradients against their inputs; returns the type of those of parameters."""
    by_name = {"x": x, **dict(zip(_KEPT, kept))}
    types = set()
    for name, tensor in written.items():
        like = by_name[name]
        if like is None:
            raise ArgumentError(f"moeblas.torch: d{name} is given, wanted None without {name}")
        free = name in PARAMS and name != "router_bias"
        wanted = (x.dtype, torch.float32) if free else (like.dtype,)
        _check_output("d" + name, tensor, like.shape, wanted, x)
        types |= {tensor.dtype} if free else set()
    if len(types) > 1:
        raise ArgumentError(
            f"moeblas.torch: gradients are {sorted(map(str, types))},"
            " wanted all float32 or all as x"
        )
    return types.pop() if types else None


def _backward_out(
    dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object, **outputs: Tensor | None
) -> None:
    *kept, saved, options, accumulate = rest
    written = {name[1:]: tensor for name, tensor in outputs.items() if tensor is not None}
    call = _backward_call(x, kept, options, _check_grads(x, kept, written))
    _run_backward(call, (dout, dlosses, saved), written, accumulate)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """What an op that only writes into tensors of the caller does while tracing."""


# ---- autograd

_NAMES = ("x", *_INPUT_NAMES)
_KEPT_AT = [_NAMES.index(name) for name in ("x", *_KEPT)]
_GRADS_AT = [_NAMES.index(name) for name in GRADS]


class _Forward(torch.autograd.Function):
    """Not torch.library.register_autograd: that reads the schema at each call, 5 us an argument."""

    @staticmethod
    def forward(ctx, options: str, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = forward(*tensors, options, True)
        ctx.options = options
        ctx.save_for_backward(*[tensors[i] for i in _KEPT_AT], outputs[-1])
        ctx.mark_non_differentiable(*outputs[2:])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, dout: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "moeblas.torch: backward with create_graph = True, wanted without: the layer can be"
                " differentiated once"
            )
        x, *kept, saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        wanted = [needed[i] for i in _GRADS_AT]
        if dout is None:
            dout = x.new_zeros(x.shape)
        dlosses = others[0] if len(others) > 1 else None
        with torch._C._AutoDispatchBelowAutograd():
            found = backward(dout, dlosses, x, *kept, saved, ctx.options, wanted)
        grads: list[Tensor | None] = [None] * (1 + len(_NAMES))
        for i, grad in zip([i for i, want in zip(_GRADS_AT, wanted) if want], found):
            grads[1 + i] = grad
        return tuple(grads)


def _refuse_tangents(tensors: Tensors) -> None:
    """Inside forward-mode differentiation: without this, tangents would silently be lost."""
    for name, tensor in zip(_NAMES, tensors):
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(
                f"moeblas.torch: {name} has a forward-mode tangent, wanted none: the layer is"
                " differentiated backward"
            )


def forward_eagerly(*arguments: object) -> list[Tensor]:
    """What ``forward`` does on its Autograd key, which eager callers need not be dispatched to."""
    *tensors, options, save = arguments
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(_Forward.apply(options, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return forward(*tensors, options, save)


for _key in ("CPU", "CUDA"):
    library.impl("forward", _forward, _key)
    library.impl("forward.out", _forward_out, _key)
    library.impl("backward", _backward, _key)
    library.impl("backward.out", _backward_out, _key)
library.impl("forward", forward_eagerly, "Autograd")
torch.library.register_fake("moeblas::forward", _forward_fake, lib=library)
torch.library.register_fake("moeblas::backward", _backward_fake, lib=library)
torch.library.register_fake("moeblas::forward.out", _nothing, lib=library)
torch.library.register_fake("moeblas::backward.out", _nothing, lib=library)
