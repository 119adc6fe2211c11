# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.moeblas.*``, for CPU and CUDA: strict, one call of the library each.

    forward       inputs -> [out, losses, topk_ids, topk_weights, counts, global_counts, saved]; differentiable
    forward.out   the same for inference, into tensors of the caller
    backward      -> the gradients that `wanted` names, in the order of ``_layer.GRADS``
    backward.out  into tensors of the caller, written or accumulated, in fp32 if those are fp32

``options`` is the text that ``functional.options_text`` makes. All memory is torch's: outputs, the buffer for backward
and the workspace are tensors; work goes to the current stream; outputs never alias inputs. Strided or misaligned inputs
are copied first. ``moeblas.torch.experts`` and ``moe`` are the convenient way to these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from .. import ArgumentError, ParamGrads, Params
from ._layer import GRADS, PARAMS, ROUTING, Layer, Traits, find, traits

Tensors = Sequence[Optional[Tensor]]

_OF_TOKENS = ("logits", "ids", "weights", "padding_mask")
_REPORTS = ("losses", "topk_ids", "topk_weights", "counts")
# What backward reads of forward's inputs.
_KEPT = tuple(name for name in ROUTING + PARAMS if name not in ("ids", "global_counts"))


def _arguments(names: Sequence[str]) -> str:
    """The names as schema arguments."""
    return ", ".join(f"Tensor{'' if name in ('w1', 'w2') else '?'} {name}" for name in names)


def _results(names: Sequence[str]) -> str:
    """The names as optional outputs of the caller, each with an alias letter of its own."""
    return ", ".join(f"Tensor({chr(98 + i)}!)? {name}=None" for i, name in enumerate(names))


_INPUTS = _arguments(ROUTING + PARAMS)
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


# ---- what both directions need


def _ready(tensor: Tensor) -> Tensor:
    """The tensor as the library reads it: contiguous and aligned to 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _given(x: Tensor, tensors: Tensors) -> dict[str, Tensor]:
    """The inputs that are there, by name and ready. The number of tokens is no part of a layer's key: checked here."""
    given = {}
    for name, tensor in zip(ROUTING + PARAMS, tensors):
        if tensor is None:
            continue
        if name in _OF_TOKENS and tensor.shape[0] != x.shape[0]:
            raise ArgumentError(
                f"moeblas.torch: {name} has {tensor.shape[0]} rows, wanted {x.shape[0]} as x"
            )
        given[name] = _ready(tensor)
    return given


def _check_width(x: Tensor) -> None:
    if x.dim() != 2:
        raise ArgumentError(
            f"moeblas.torch: x has {x.dim()} dimensions, wanted 2: [tokens, hidden]"
        )


def _layer(
    x: Tensor, options: str, tensors: Tensors, grad_dtype: torch.dtype | None = None
) -> Layer:
    """The cached layer of these tensors (in the order of ROUTING + PARAMS), all of it checked."""
    _check_width(x)
    device = x.get_device()
    units = torch.get_num_threads() if device < 0 else 0
    key = [traits(tensor, name in _OF_TOKENS) for name, tensor in zip(ROUTING + PARAMS, tensors)]
    return find(options, x.shape[1], x.dtype, device, units, grad_dtype, tuple(key))


def _fake_layer(x: Tensor, options: str, tensors: Tensors) -> Layer:
    """``_layer`` while tracing: sizes become numbers, and the plan is the CPU's, so that no device is touched."""
    _check_width(x)
    key = [traits(tensor, name in _OF_TOKENS) for name, tensor in zip(ROUTING + PARAMS, tensors)]
    key = [
        found and Traits(tuple(int(size) for size in found.shape), found.dtype, -1) for found in key
    ]
    return find(options, int(x.shape[1]), x.dtype, -1, 0, None, tuple(key))


def _run(call: Callable, device: int, structs: tuple, fields: dict[str, int | float]) -> None:
    """One call of the library, on the current stream of the device; the current device stays what it is."""
    if device < 0:
        call(*structs, **fields)
        return
    stream = torch.cuda.current_stream(device).cuda_stream
    if device == torch.cuda.current_device():
        call(*structs, stream, **fields)
    else:
        with torch.cuda.device(device):
            call(*structs, stream, **fields)


def _fields(
    layer: Layer, x: Tensor, given: dict[str, Tensor], saved: Tensor | None
) -> dict[str, int]:
    """The fields that both argument structs have, but the workspace."""
    fields = {"tokens": x.shape[0], "x": x.data_ptr()}
    for name in ("logits", "row_offset", "padding_mask", "token_count"):
        if name in given:
            fields[name] = given[name].data_ptr()
    if "weights" in given:
        fields["given_weights"] = given["weights"].data_ptr()
    if saved is not None:
        fields["saved"] = saved.data_ptr()
        fields["saved_bytes"] = saved.numel()
    return fields


def _params(given: dict[str, Tensor]) -> Params:
    return Params(**{name: given[name].data_ptr() for name in PARAMS if name in given})


def _check_output(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], x: Tensor
):
    """An output of the caller must be one that the library can write to directly."""
    fits = tensor.shape == tuple(shape) and tensor.dtype in dtypes and tensor.device == x.device
    if not fits or _ready(tensor) is not tensor:
        raise ArgumentError(
            f"moeblas.torch: {name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, wanted"
            f" {list(shape)} {' or '.join(map(str, dtypes))} on {x.device}, contiguous and aligned to 16 bytes"
        )


# ---- forward


def _run_forward(
    layer: Layer, x: Tensor, given: dict[str, Tensor], outputs: dict[str, Tensor]
) -> None:
    """Runs moe_forward; ``outputs`` are named as in moe_forward_args."""
    workspace = x.new_empty(layer.workspace(x.shape[0]), dtype=torch.uint8)
    fields = _fields(layer, x, given, outputs.get("saved"))
    if "ids" in given:
        fields["given_ids"] = given["ids"].data_ptr()
    for name, tensor in outputs.items():
        fields[name] = tensor.data_ptr()
    fields["workspace"], fields["workspace_bytes"] = workspace.data_ptr(), workspace.numel()
    _run(layer.plan.forward, x.get_device(), (_params(given),), fields)


def _shapes(layer: Layer, x: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """What forward writes, in the op's order; the number of tokens may be symbolic."""
    tokens = x.shape[0]
    shapes = {"out": (x.shape, x.dtype)}
    if layer.routed:
        shapes["losses"] = ((2,), torch.float32)
        shapes["topk_ids"] = ((tokens, layer.topk), torch.int32)
        shapes["topk_weights"] = ((tokens, layer.topk), torch.float32)
        shapes["counts"] = ((layer.experts,), torch.int32)
    return shapes


def _empty_outputs(layer: Layer, x: Tensor, counts: Tensor | None, save: bool) -> dict[str, Tensor]:
    outputs = {
        name: x.new_empty(shape, dtype=dtype) for name, (shape, dtype) in _shapes(layer, x).items()
    }
    if counts is not None:
        outputs["global_counts"] = counts
    if save:
        outputs["saved"] = x.new_empty(layer.saved_bytes(x.shape[0]), dtype=torch.uint8)
    return outputs


def _forward(x: Tensor, *rest: object) -> list[Tensor]:
    *tensors, options, save = rest
    layer = _layer(x, options, tensors)
    x, given = _ready(x), _given(x, tensors)
    counts = given.get("global_counts")
    outputs = _empty_outputs(layer, x, counts if counts is None else counts.clone(), save)
    _run_forward(layer, x, given, outputs)
    return list(outputs.values())


def _forward_fake(x: Tensor, *rest: object) -> list[Tensor]:
    *tensors, options, save = rest
    counts = tensors[ROUTING.index("global_counts")]
    counts = counts if counts is None else torch.empty_like(counts)
    return list(_empty_outputs(_fake_layer(x, options, tensors), x, counts, save).values())


def _forward_out(x: Tensor, *rest: object, **outputs: Tensor | None) -> None:
    *tensors, options = rest
    layer = _layer(x, options, tensors)
    written = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    shapes = _shapes(layer, x)
    for name, tensor in written.items():
        if name not in shapes:
            raise ArgumentError(f"moeblas.torch: {name} is given, wanted None without a router")
        _check_output(name, tensor, shapes[name][0], (shapes[name][1],), x)
    counts = tensors[ROUTING.index("global_counts")]
    if counts is not None:
        _check_output("global_counts", counts, counts.shape, (torch.int64,), x)
        written["global_counts"] = counts
    x, given = _ready(x), _given(x, tensors)
    _run_forward(layer, x, given, written)


# ---- backward

# Fields of moe_backward_args whose names are not d + the input's.
_FIELDS = {"weights": "dtopk_weights"}


def _spread(kept: Tensors) -> list[Tensor | None]:
    """The inputs that backward reads, in the order of ROUTING + PARAMS."""
    by_name = dict(zip(_KEPT, kept))
    return [by_name.get(name) for name in ROUTING + PARAMS]


def _run_backward(
    layer: Layer,
    dout: Tensor,
    dlosses: Tensor | None,
    x: Tensor,
    given: dict[str, Tensor],
    saved: Tensor,
    grads: dict[str, Tensor],
    accumulate: bool,
) -> None:
    """Runs moe_backward; ``grads`` are named as the inputs they belong to."""
    workspace = x.new_empty(layer.workspace(x.shape[0]), dtype=torch.uint8)
    fields = _fields(layer, x, given, saved)
    fields["workspace"], fields["workspace_bytes"] = workspace.data_ptr(), workspace.numel()
    fields["accumulate"] = int(accumulate)
    fields["dout"] = dout.data_ptr()
    if dlosses is None or not layer.has_losses:
        fields["skip_losses"] = 1
    else:
        fields["dlosses"] = dlosses.data_ptr()
    addresses = {name: tensor.data_ptr() for name, tensor in grads.items()}
    for name in GRADS[:3]:
        if name in addresses:
            fields[_FIELDS.get(name, "d" + name)] = addresses.pop(name)
    _run(layer.plan.backward, x.get_device(), (_params(given), ParamGrads(**addresses)), fields)


def _start_backward(
    dout: Tensor, dlosses: Tensor | None, x: Tensor, tensors: Tensors, saved: Tensor
):
    """dout, dlosses, x and the inputs, checked and ready; `saved` must be what forward left."""
    if dout.shape != x.shape or dout.dtype != x.dtype or dout.device != x.device:
        raise ArgumentError(
            f"moeblas.torch: dout is {list(dout.shape)} {dout.dtype} on {dout.device}, wanted"
            f" {list(x.shape)} {x.dtype} on {x.device} as x"
        )
    if saved.dtype != torch.uint8 or saved.device != x.device or _ready(saved) is not saved:
        raise ArgumentError("moeblas.torch: saved is not what forward returned with save = True")
    if dlosses is not None:
        dlosses = _ready(dlosses)
        _check_output("dlosses", dlosses, (2,), (torch.float32,), x)
    return _ready(dout), dlosses, _ready(x), _given(x, tensors)


def _empty_grads(x: Tensor, tensors: Tensors, wanted: Sequence[bool]) -> dict[str, Tensor]:
    """One tensor for each gradient wanted, like its input."""
    by_name = {"x": x, **dict(zip(ROUTING + PARAMS, tensors))}
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
    layer = _layer(x, options, tensors)
    grads = _empty_grads(x, tensors, wanted)
    dout, dlosses, x, given = _start_backward(dout, dlosses, x, tensors, saved)
    router = grads.get("router_weight")
    written = dict(grads)
    if router is not None and router.dtype != x.dtype:
        written["router_weight"] = router.new_empty(router.shape, dtype=x.dtype)
    _run_backward(layer, dout, dlosses, x, given, saved, written, False)
    if router is not None and router.dtype != x.dtype:
        router.copy_(written["router_weight"])
    return list(grads.values())


def _backward_fake(dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object) -> list[Tensor]:
    *kept, _saved, _options, wanted = rest
    return list(_empty_grads(x, _spread(kept), wanted).values())


def _backward_out(
    dout: Tensor, dlosses: Tensor | None, x: Tensor, *rest: object, **outputs: Tensor | None
):
    *kept, saved, options, accumulate = rest
    tensors = _spread(kept)
    by_name = {"x": x, **dict(zip(ROUTING + PARAMS, tensors))}
    written = {name[1:]: tensor for name, tensor in outputs.items() if tensor is not None}
    types = {
        tensor.dtype for name, tensor in written.items() if name in PARAMS and name != "router_bias"
    }
    if len(types) > 1:
        raise ArgumentError(
            f"moeblas.torch: gradients of types {types}, wanted all float32 or all as x"
        )
    for name, tensor in written.items():
        like = by_name[name]
        if like is None:
            raise ArgumentError(f"moeblas.torch: d{name} is given, wanted None without {name}")
        of_params = name in PARAMS and name != "router_bias"
        _check_output(
            "d" + name,
            tensor,
            like.shape,
            (x.dtype, torch.float32) if of_params else (like.dtype,),
            x,
        )
    layer = _layer(x, options, tensors, types.pop() if types else None)
    dout, dlosses, x, given = _start_backward(dout, dlosses, x, tensors, saved)
    _run_backward(layer, dout, dlosses, x, given, saved, written, accumulate)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """What an op that only writes into tensors of the caller does while tracing."""


# ---- autograd

_TENSORS = 1 + len(ROUTING) + len(PARAMS)
_NAMES = ("x", *ROUTING, *PARAMS)


class _Forward(torch.autograd.Function):
    """Not torch.library.register_autograd: that reads the schema at every call, 5 us for each argument of it."""

    @staticmethod
    def forward(ctx, options: str, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = torch.ops.moeblas.forward.default(*tensors, options, True)
        ctx.options = options
        by_name = dict(zip(_NAMES, tensors))
        ctx.save_for_backward(by_name["x"], *(by_name[name] for name in _KEPT), outputs[-1])
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
        needed = dict(zip(_NAMES, ctx.needs_input_grad[1:]))
        wanted = [needed[name] for name in GRADS]
        if dout is None:
            dout = x.new_zeros(x.shape)
        dlosses = others[0] if len(others) > 1 else None
        grads = torch.ops.moeblas.backward.default(
            dout, dlosses, x, *kept, saved, ctx.options, wanted
        )
        found = iter(grads)
        by_name = {name: next(found) for name, want in zip(GRADS, wanted) if want}
        return None, *(by_name.get(name) for name in _NAMES)


def _forward_autograd(*arguments: object) -> list[Tensor]:
    *tensors, options, save = arguments
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(_Forward.apply(options, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.moeblas.forward.default(*tensors, options, save)


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
