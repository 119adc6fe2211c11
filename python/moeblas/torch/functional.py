# SPDX-License-Identifier: Apache-2.0
"""The layer as functions: ``experts`` (routing given), ``rows`` (rows already sorted by expert),
``moe`` (with the router).

They bring tensors into the form the operators want (types, autocast, two dimensions) and options
into one text. What the options mean is said in moeblas.h, under the same names.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _options
from .._options import ExpertOptions, RouterOptions
from ._layer import PARAMS, ROUTING
from .ops import forward, forward_eagerly


class Routing(NamedTuple):
    """What ``moe`` decided. Only the losses are differentiable: add them to the model's."""

    balance_loss: Tensor  # scalar, fp32, coefficient included; 0 without balance
    z_loss: Tensor  # scalar, fp32, coefficient included
    ids: Tensor  # [T, K] int32, -1 where masked
    weights: Tensor  # [T, K] fp32
    counts: Tensor  # [E] int32, slots that chose each expert, before capacity drops
    global_counts: Tensor | None  # [E+1] int64, what was given plus this call


_INPUTS = ROUTING + PARAMS
_IN_FP32 = ("router_bias", "correction_bias")
_KNOWN = {"topk", *ExpertOptions.__annotations__, *RouterOptions.__annotations__}


@torch.compiler.assume_constant_result
def options_text(entry: str, **options: str | float) -> str:
    """The options as the text that operators take, one for equal options.

    ``entry`` is "hidden", "logits", "ids" or "rows". Raises TypeError for an option that does not
    exist; what makes no sense together is refused when the layer is first used.
    """
    return _options_text(entry, **options)


@lru_cache(maxsize=1024)
def _options_text(entry: str, **options: str | float) -> str:
    unknown = sorted(set(options) - _KNOWN)
    if unknown:
        raise TypeError(
            f"moeblas.torch: unknown options {unknown}, wanted some of {sorted(_KNOWN)}"
        )
    return json.dumps({"entry": entry, **_options.config_fields(options)}, sort_keys=True)


# ---- types and shapes


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def cast_ids(ids: Tensor) -> Tensor:
    """Expert ids as the operators take them; int64 ids are cut to 32 bits."""
    return _cast(ids, torch.int32)


def _autocast(tensors: dict[str, Tensor | None], dtype: torch.dtype) -> None:
    """Parameters take the type of autocast; a router in fp32 stays so."""
    for name in PARAMS:
        tensor = tensors.get(name)
        if tensor is not None and (name != "router_weight" or tensor.dtype != torch.float32):
            tensors[name] = _cast(tensor, dtype)


def call(options: str, x: Tensor, tensors: dict[str, Tensor | None]) -> list[Tensor]:
    """The operator ``forward`` on x [..., H] and the tensors, named as in ROUTING and PARAMS.

    The biases of the router are taken in fp32. Without autocast, other parameters must have the
    type of x: a mistake there is refused, not converted. The first output has the shape of x.
    """
    biases = [(name, tensors[name]) for name in _IN_FP32 if name in tensors]
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        _autocast(tensors, dtype)
        x = _cast(x, dtype)
    for name, tensor in biases:
        tensors[name] = _cast(tensor, torch.float32)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    inputs = [tensors.get(name) for name in _INPUTS]
    operator = forward if torch.compiler.is_compiling() else forward_eagerly
    outputs = operator(flat, *inputs, options, False)
    if x.dim() != 2:
        outputs[0] = outputs[0].view(x.shape)
    return outputs


# ---- the layer


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    padding_mask: Tensor | None = None,
    token_count: Tensor | None = None,
    **options,
) -> Tensor:
    """Runs chosen experts: out[t] = sum over j of weights[t,j] expert_ids[t,j](x[t]).

    Args:
        x: [..., H] in fp32, bf16 or fp16; T is the product of the leading sizes.
        ids: [T, K] int32, or int64 (converted). An id outside [0, E) contributes exactly zero.
        weights: [T, K], any floating type; used in fp32.
        w1: [E, F2, H] as x, with F2 = 2F when the activation is gated, else F; [E, H, F2] if
            ``transposed``.
        w2: [E, H, F] as x; [E, F, H] if ``transposed``.
        b1, b2: [E, F2] and [E, H] as x, or None.
        padding_mask: [T] bool; True: the token takes no part.
        token_count: [1] int32 on the device: tokens from it on take no part.
        options: see ``ExpertOptions``.

    Returns:
        [..., H], the type of x (of autocast where that is on). Differentiable in x, weights, w1,
        w2, b1, b2.

    Raises:
        moeblas.ArgumentError: shapes, types or options that do not fit together.
        moeblas.UnsupportedError: what the back end does not do.
    """
    tensors = {"w1": w1, "w2": w2, "b1": b1, "b2": b2}
    tensors |= {"padding_mask": padding_mask, "token_count": token_count}
    tensors["ids"], tensors["weights"] = cast_ids(ids), _cast(weights, torch.float32)
    return call(options_text("ids", **options), x, tensors)[0]


def rows(
    x: Tensor,
    row_offset: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    **options,
) -> Tensor:
    """Runs experts on rows that are already sorted by expert, as expert parallelism has them.

    Args:
        x: [R, H]; rows row_offset[e] .. row_offset[e+1]-1 are those of expert e.
        row_offset: [E+1] int32, or int64 (converted); it stays on the device.
        w1, w2, b1, b2: as for ``experts``.
        weights: [R], any floating type, or None for 1.
        options: see ``ExpertOptions``.

    Returns:
        [R, H]; rows from row_offset[E] on are zero. Differentiable as ``experts``.
    """
    tensors = {"w1": w1, "w2": w2, "b1": b1, "b2": b2, "row_offset": _cast(row_offset, torch.int32)}
    tensors["weights"] = _cast(weights, torch.float32)
    return call(options_text("rows", **options), x, tensors)[0]


def routed(
    options: str, x: Tensor, router_weight: Tensor | None, tensors: dict[str, Tensor | None]
) -> tuple[Tensor, Routing]:
    """``moe`` with its options as text and everything optional in ``tensors``."""
    tensors["router_weight"] = router_weight
    tensors["ids"] = _cast(tensors.get("ids"), torch.int32)
    outputs = call(options, x, tensors)
    out, losses, ids, weights, counts = outputs[:5]
    new_counts = None if tensors.get("global_counts") is None else outputs[5]
    return out, Routing(losses[0], losses[1], ids, weights, counts, new_counts)


def moe(
    x: Tensor,
    router_weight: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    *,
    topk: int,
    logits: Tensor | None = None,
    ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    token_count: Tensor | None = None,
    global_counts: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    router_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    latent_down: Tensor | None = None,
    latent_up: Tensor | None = None,
    **options,
) -> tuple[Tensor, Routing]:
    """The whole layer: router, experts, and what may stand beside them.

    Args:
        x: [..., H]; T is the product of the leading sizes, K = ``topk``.
        router_weight: [E, H] as x or fp32; None if ``logits`` are given.
        w1, w2, b1, b2: as for ``experts``, with L in place of H if there are latent projections.
        logits: [T, E] in place of the router product.
        ids: [T, K] to use instead of the router's choice (their weights still come from the
            scores).
        padding_mask: [T] bool; True: the token takes no part, in no loss and no count.
        token_count: [1] int32 on the device: tokens from it on take no part. One graph or
            compiled call then serves every batch of up to T tokens.
        global_counts: [E+1] int64, for ``balance="global"``; not written to, the new ones are
            returned.
        router_bias, correction_bias: [E], used in fp32; the second only selects and has no
            gradient.
        shared_w1, shared_w2: [S2, H] and [H, S], the shared expert; shared_gate: [H], its sigmoid
            gate.
        latent_down, latent_up: [L, H] and [H, L], around the routed experts.
        options: see ``ExpertOptions`` and ``RouterOptions``.

    Returns:
        out [..., H], differentiable in x, logits and every parameter; and the ``Routing``.

    Raises:
        As ``experts``.
    """
    tensors = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "logits": logits, "ids": ids}
    tensors |= {"padding_mask": padding_mask, "token_count": token_count}
    tensors |= {"global_counts": global_counts, "router_bias": router_bias}
    tensors |= {"correction_bias": correction_bias, "shared_w1": shared_w1, "shared_w2": shared_w2}
    tensors |= {"shared_gate": shared_gate, "latent_down": latent_down, "latent_up": latent_up}
    entry = "hidden" if logits is None else "logits"
    return routed(options_text(entry, topk=topk, **options), x, router_weight, tensors)
