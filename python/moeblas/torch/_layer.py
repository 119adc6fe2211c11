# SPDX-License-Identifier: Apache-2.0
"""From tensors to a plan: which layer the shapes describe, checked once for each set of shapes.

Everything that a call shares with the calls before it is in one cached ``Layer``: the plan, its
sizes, and the fact that all tensors fit together. A call then only builds the key (options, shapes,
types, devices) and takes addresses.
Invariant: no address reaches the library unless shape, type and device of its tensor are part of a
checked key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .. import (
    ArgumentError,
    Balance,
    Config,
    Context,
    Dtype,
    Entry,
    ParamGrads,
    Params,
    Plan,
    UnsupportedError,
    make_config,
)

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# Inputs that go with the tokens, then the parameters, in the order of the ops' arguments.
ROUTING = (
    "logits",
    "ids",
    "weights",
    "row_offset",
    "padding_mask",
    "token_count",
    "global_counts",
)
PARAMS = tuple(name for name, _ in Params._fields_ if name != "size")
# What backward can give, in the order of its `wanted`.
GRADS = (
    "x",
    "logits",
    "weights",
    *(name for name, _ in ParamGrads._fields_ if name != "size"),
)

# Shapes in letters: T tokens, H hidden, E experts, K topk, F inter, D = L or H, S shared_inter, L
# latent; F2 and S2 are twice F and S when gated. Those in _TURNED have their last two letters
# swapped when transposed.
_SHAPES = {
    "logits": "T E",
    "ids": "T K",
    "weights": "T K",
    "row_offset": "E+1",
    "padding_mask": "T",
    "token_count": "1",
    "global_counts": "E+1",
    "router_weight": "E H",
    "router_bias": "E",
    "correction_bias": "E",
    "w1": "E F2 D",
    "b1": "E F2",
    "w2": "E D F",
    "b2": "E D",
    "shared_w1": "S2 H",
    "shared_w2": "H S",
    "shared_gate": "H",
    "latent_down": "L H",
    "latent_up": "H L",
}
_TURNED = ("w1", "w2", "shared_w1", "shared_w2", "latent_down", "latent_up")
_NUMBERS = {
    "ids": (torch.int32,),
    "weights": (torch.float32,),
    "row_offset": (torch.int32,),
    "padding_mask": (torch.bool, torch.uint8),
    "token_count": (torch.int32,),
    "global_counts": (torch.int64,),
    "router_bias": (torch.float32,),
    "correction_bias": (torch.float32,),
}


class Traits(NamedTuple):
    """What matters of a tensor: its shape without the tokens, its type, its device (-1: CPU)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: int


class Layer:
    """A plan with its sizes. Made by ``find``, shared by all calls of the same key."""

    def __init__(self, plan: Plan, sizes: Plan) -> None:
        self.plan = plan
        self.topk: int = plan.config.topk
        self.experts: int = plan.config.experts
        self.entry = Entry(plan.config.entry)
        self.routed = self.entry in (Entry.HIDDEN, Entry.LOGITS)
        router = plan.config.router
        self.has_losses = router.balance != Balance.NONE or router.z_coeff > 0
        self.workspace = lru_cache(maxsize=256)(plan.workspace)
        self.saved_rate, self.saved_fixed = _saved_bound(sizes)

    def saved_bytes(self, tokens: int) -> int:
        """Bytes for backward: no less than the plan wants; linear, for symbolic token counts."""
        return self.saved_rate * tokens + self.saved_fixed


def _saved_bound(plan: Plan) -> tuple[int, int]:
    """Rate and constant of a line above ``plan.saved``.

    That is a sum of arrays, each linear in the tokens, but for rounding up to 256 bytes (fewer than
    16 arrays) and to a whole sequence in the router's slopes (no more than one token's call holds).
    """
    far = 1 << 20
    rate = -(-(plan.saved(2 * far) - plan.saved(far)) // far)
    return rate, 2 * plan.saved(1) + 16 * 256


def _dims(options: dict, width: int, given: dict[str, Traits]) -> dict[str, int]:
    """The letters of _SHAPES, read off the tensors that define them."""
    if options["entry"] == "ids" and ("weights" not in given or len(given["weights"].shape) != 1):
        raise ArgumentError("moeblas.torch: weights are missing or not [T,K], wanted with ids")
    for name, rank in (("w1", 3), ("w2", 3), ("shared_w2", 2), ("latent_down", 2)):
        if name in given and len(given[name].shape) != rank:
            raise ArgumentError(
                f"moeblas.torch: {name} has shape {list(given[name].shape)},"
                f" wanted {rank} dimensions"
            )
    turned = bool(options.get("transposed"))
    gated = make_config(act=options.get("act", {})).act.gated
    dims = {"H": width, "E": given["w1"].shape[0]}
    dims["F"] = given["w2"].shape[1 if turned else 2]
    dims["S"] = given["shared_w2"].shape[0 if turned else 1] if "shared_w2" in given else 0
    dims["L"] = given["latent_down"].shape[1 if turned else 0] if "latent_down" in given else 0
    dims["D"] = dims["L"] or width
    dims["F2"], dims["S2"] = (1 + gated) * dims["F"], (1 + gated) * dims["S"]
    dims["E+1"], dims["1"] = dims["E"] + 1, 1
    if options["entry"] == "ids":
        dims["K"] = given["weights"].shape[-1]
    else:
        dims["K"] = 1 if options["entry"] == "rows" else options["topk"]
    return dims


def _check(
    name: str, found: Traits, wanted: list[int], types: Sequence[torch.dtype], device: int
) -> None:
    """One tensor against what the others say it should be."""
    if list(found.shape) != wanted:
        raise ArgumentError(
            f"moeblas.torch: {name} has shape {list(found.shape)},"
            f" wanted {wanted} ({_SHAPES[name]})"
        )
    if found.dtype not in types:
        names = " or ".join(str(dtype) for dtype in types)
        raise ArgumentError(f"moeblas.torch: {name} is {found.dtype}, wanted {names}")
    if found.device != device:
        raise ArgumentError(
            f"moeblas.torch: {name} is on device {found.device}, wanted {device} as x (-1: CPU)"
        )


def _check_all(
    options: dict, dims: dict, given: dict[str, Traits], dtype: torch.dtype, device: int
) -> None:
    """Every tensor's shape, type and device."""
    for name, found in given.items():
        letters = _SHAPES[name].split()
        if name in _TURNED and options.get("transposed"):
            letters[-2:] = letters[-1], letters[-2]
        if name == "weights" and options["entry"] == "rows":
            letters = ["T"]
        wanted = [dims[letter] for letter in letters if letter != "T"]
        types = _NUMBERS.get(name, (dtype,))
        if name == "router_weight":
            types = (dtype, torch.float32)
        elif name == "logits":
            types = tuple(DTYPES)
        _check(name, found, wanted, types, device)


def _config(options: dict, dims: dict, given: dict[str, Traits], dtype: torch.dtype) -> Config:
    """The plan's configuration: the options, and what the tensors say."""
    fields = {**options, "dtype": DTYPES[dtype], "hidden": dims["H"], "inter": dims["F"]}
    fields |= {
        "experts": dims["E"],
        "topk": dims["K"],
        "shared_inter": dims["S"],
        "latent": dims["L"],
    }
    for name, field in (("router_weight", "router_dtype"), ("logits", "logits_dtype")):
        if name in given:
            fields[field] = DTYPES[given[name].dtype]
    return make_config(**fields)


@lru_cache(maxsize=1024)
def find(
    text: str,
    width: int,
    dtype: torch.dtype,
    device: int,
    units: int,
    grad_dtype: torch.dtype | None,
    key: tuple[tuple[str, tuple[int, ...], torch.dtype, int], ...],
) -> Layer:
    """The layer of these options and tensors; refuses what does not fit together.

    Args:
        text: the options as JSON, see ``functional.options_text``.
        width, dtype: of x.
        device: a CUDA ordinal, or -1 for the CPU, which uses ``units`` threads.
        grad_dtype: of the gradients of parameters, if not dtype.
        key: name and ``Traits`` of every other input that is there.
    """
    options = json.loads(text)
    given = {name: Traits(*found) for name, *found in key}
    if dtype not in DTYPES:
        raise UnsupportedError(f"moeblas.torch: x is {dtype}, wanted float32, bfloat16 or float16")
    dims = _dims(options, width, given)
    _check_all(options, dims, given, dtype, device)
    config = _config(options, dims, given, dtype)
    limit, config.sm_limit = config.sm_limit, 0
    sizes = Plan(Context.get("cpu"), config)  # the same on any device, and without one
    config.sm_limit = limit
    if grad_dtype is not None:
        config.grad_dtype = Dtype[DTYPES[grad_dtype].upper()]
    context = Context.get("cpu", units) if device < 0 else Context.get("cuda", device)
    plan = Plan(context, config)
    plan.warmup()
    return Layer(plan, sizes)
