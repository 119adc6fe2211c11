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
from typing import Optional

import torch
from torch import Tensor

from .. import ArgumentError, ParamGrads, Params
from ._layer import GRADS, PARAMS, ROUTING, Layer, find

Tensors = Sequence[Optional[Tensor]]

_INPUT_NAMES = ROUTING + PARAMS
_OF_TOKENS = frozenset(("logits", "ids", "weights", "padding_mask"))
_COUNTS = _INPUT_NAMES.index("global_counts")
_PARAMS = frozenset(PARAMS)
_FIELDS = {"ids": "given_ids", "weights": "given_weights"}  # where moeblas.h has another name
_REPORTS = ("losses", "topk_ids", "topk_weights", "counts")
# What backward reads of forward's inputs.
_KEPT = tuple(name for name in _INPUT_NAMES if name not in ("ids", "global_counts"))


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


def _ready(tensor: Tensor) -> Tensor:
    """The tensor as the library reads it: contiguous and aligned to 16 bytes."""
    if tensor.is_contiguous() and not tensor.data_ptr() & 15:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class _Inputs:
    """The inputs of one call: the key of their layer, their addresses, and what keeps them."""

    __slots__ = ("_held", "fields", "key", "params", "x")

    def __init__(self, x: Tensor, tensors: Tensors) -> None:
        tokens = _tokens(x)
        self.x = _ready(x)
        self.fields: dict[str, int] = {"tokens": tokens, "x": self.x.data_ptr()}
        params, held, key = {}, [], []
        for name, tensor in zip(_INPUT_NAMES, tensors):
            if tensor is None:
                continue
            shape = tensor.shape
            if name in _OF_TOKENS:
                _check_rows(name, shape, tokens)
                shape = shape[1:]
            key.append((name, shape, tensor.dtype, tensor.get_device()))
            address = tensor.data_ptr()
            if address & 15 or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                address = tensor.data_ptr()
            held.append(tensor)
            (params if name in _PARAMS else self.fields)[_FIELDS.get(name, name)] = address
        self.key, self._held, self.params = tuple(key), held, Params(**params)

    def layer(self, options: str, grad_dtype: torch.dtype | None = None) -> Layer:
        """The cached layer of these tensors, all of them checked."""
        x = self.x
        device = x.get_device()
        units = torch.get_num_threads() if device < 0 else 0
        return find(options, x.shape[1], x.dtype, device, units, grad_dtype, self.key)

    def run(self, call: Callable, layer: Layer, *structs: object) -> None:
        """One call of the library, on the current stream; the current device stays what it is."""
        fields, x = self.fields, self.x
        workspace = x.new_empty(layer.workspace(x.shape[0]), dtype=torch.uint8)
        fields["workspace"], fields["workspace_bytes"] = workspace.data_ptr(), workspace.numel()
        device = x.get_device()
        if device < 0:
            call(self.params, *structs, **fields)
            return
        stream = torch.cuda.current_stream(device).cuda_stream
        if device == torch.cuda.current_device():
            call(self.params, *structs, stream, **fields)
        else:
            with torch.cuda.device(device):
                call(self.params, *structs, stream, **fields)


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


def _run_forward(layer: Layer, inputs: _Inputs, outputs: dict[str, Tensor]) -> None:
    """Runs moe_forward; ``outputs`` are named as in moe_forward_args."""
    for name, tensor in outputs.items():
        inputs.fields[name] = tensor.data_ptr()
    if "saved" in outputs:
        inputs.fields["saved_bytes"] = outputs["saved"].numel()
    inputs.run(layer.plan.forward, layer)


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
    outputs = {"out": x.new_empty(x.shape)}
    for name, (shape, dtype) in _reports(layer, x.shape[0]).items():
        outputs[name] = x.new_empty(shape, dtype=dtype)
    if counts is not None:
        outputs["global_counts"] = counts
    if save:
        outputs["saved"] = x.new_empty(layer.saved_bytes(x.shape[0]), dtype=torch.uint8)
    return outputs


def _forward(x: Tensor, *rest: object) -> list[Tensor]:
    *tensors, options, save = rest
    inputs = _Inputs(x, tensors)
    layer = inputs.layer(options)
    counts = tensors[_COUNTS]
    outputs = _empty_outputs(layer, x, counts if counts is None else _copy(counts), save)
    _run_forward(layer, inputs, outputs)
    return list(outputs.values())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _forward_fake(x: Tensor, *rest: object) -> list[Tensor]:
    *tensors, options, save = rest
    counts = tensors[_COUNTS]
    if counts is not None:
        counts = torch.empty_like(counts, memory_format=torch.contiguous_format)
    return list(_empty_outputs(_fake_layer(x, options, tensors), x, counts, save).values())


def _forward_out(x: Tensor, *rest: object, **outputs: Tensor | None) -> None:
    *tensors, options = rest
    inputs = _Inputs(x, tensors)
    layer = inputs.layer(options)
    written = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    shapes = {"out": (x.shape, x.dtype), **_reports(layer, x.shape[0])}
    for name, tensor in written.items():
        if name not in shapes:
            raise ArgumentError(f"moeblas.torch: {name} is given, wanted None without a router")
        _check_output(name, tensor, shapes[name][0], (shapes[name][1],), x)
    counts = tensors[_COUNTS]
    if counts is not None:
        _check_output("global_counts", counts, counts.shape, (torch.int64,), x)
        written["global_counts"] = counts
    _run_forward(layer, inputs, written)


# ---- backward


def _spread(kept: Tensors) -> list[Tensor | None]:
    """The inputs that backward reads, in the order of ROUTING + PARAMS."""
    by_name = dict(zip(_KEPT, kept))
    return [by_name.get(name) for name in _INPUT_NAMES]


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
    layer: Layer,
    inputs: _Inputs,
    given: tuple[Tensor, Tensor | None, Tensor],
    grads: dict[str, Tensor],
    accumulate: bool,
) -> None:
    """Runs moe_backward on (dout, dlosses, saved); ``grads`` are named as their inputs."""
    dout, dlosses, saved = given
    fields, x = inputs.fields, inputs.x
    _check_saved(dout, x, saved)
    dout = _ready(dout)
    fields["dout"], fields["accumulate"] = dout.data_ptr(), int(accumulate)
    fields["saved"], fields["saved_bytes"] = saved.data_ptr(), saved.numel()
    if dlosses is None or not layer.has_losses:
        fields["skip_losses"] = 1
    else:
        dlosses = _ready(dlosses)
        _check_output("dlosses", dlosses, (2,), (torch.float32,), x)
        fields["dlosses"] = dlosses.data_ptr()
    addresses = {name: tensor.data_ptr() for name, tensor in grads.items()}
    for name, field in (("x", "dx"), ("logits", "dlogits"), ("weights", "dtopk_weights")):
        if name in addresses:
            fields[field] = addresses.pop(name)
    inputs.run(layer.plan.backward, layer, ParamGrads(**addresses))


def _empty_grads(x: Tensor, tensors: Tensors, wanted: Sequence[bool]) -> dict[str, Tensor]:
    """One tensor for each gradient wanted, like its input."""
    by_name = {"x": x, **dict(zip(_INPUT_NAMES, tensors))}
    grads = {}
    for name, want in zip(GRADS, wanted):
        if want and by_name[name] is None:
            raise ArgumentError(f"moeblas.torch: wanted has {name}, which was not given")
        if want:
            like = by_name[name]
            grads[name] = like.new_empty(like.shape)
    return grads


def _backward(dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object) -> list[Tensor]:
    *kept, saved, options, wanted = rest
    tensors = _spread(kept)
    inputs = _Inputs(x, tensors)
    layer = inputs.layer(options)
    grads = _empty_grads(x, tensors, wanted)
    written, router = grads, grads.get("router_weight")
    if router is not None and router.dtype != x.dtype:  # the library writes it as the others
        written = {**grads, "router_weight": router.new_empty(router.shape, dtype=x.dtype)}
    _run_backward(layer, inputs, (dout, dlosses, saved), written, False)
    if written is not grads:
        router.copy_(written["router_weight"])
    return list(grads.values())


def _backward_fake(dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object) -> list[Tensor]:
    *kept, _saved, _options, wanted = rest
    return list(_empty_grads(x, _spread(kept), wanted).values())


def _check_grads(x: Tensor, tensors: Tensors, written: dict[str, Tensor]) -> torch.dtype | None:
    """The caller's gradients against their inputs; returns the type of those of parameters."""
    by_name = {"x": x, **dict(zip(_INPUT_NAMES, tensors))}
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
    tensors = _spread(kept)
    written = {name[1:]: tensor for name, tensor in outputs.items() if tensor is not None}
    inputs = _Inputs(x, tensors)
    layer = inputs.layer(options, _check_grads(x, tensors, written))
    _run_backward(layer, inputs, (dout, dlosses, saved), written, accumulate)


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
        found = backward(dout, dlosses, x, *kept, saved, ctx.options, wanted)
        grads: list[Tensor | None] = [None] * (1 + len(_NAMES))
        for i, grad in zip([i for i, want in zip(_GRADS_AT, wanted) if want], found):
            grads[1 + i] = grad
        return tuple(grads)


def _forward_autograd(*arguments: object) -> list[Tensor]:
    *tensors, options, save = arguments
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(_Forward.apply(options, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return forward(*tensors, options, save)


for _key in ("CPU", "CUDA"):
    library.impl("forward", _forward, _key)
    library.impl("forward.out", _forward_out, _key)
    library.impl("backward", _backward, _key)
    library.impl("backward.out", _backward_out, _key)
library.impl("forward", _forward_autograd, "Autograd")
torch.library.register_fake("moeblas::forward", _forward_fake, lib=library)
torch.library.register_fake("moeblas::backward", _backward_fake, lib=library)
torch.library.register_fake("moeblas::forward.out", _nothing, lib=library)
torch.library.register_fake("moeblas::backward.out", _nothing, lib=library)
