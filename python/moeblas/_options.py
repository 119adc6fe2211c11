# SPDX-License-Identifier: Apache-2.0
"""The flat options that the bindings of frameworks share, and how they become a configuration.

A binding adds what only it offers by inheriting, and refuses what is in none of its classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from ._structs import ActDesc, RouterDesc

_ACT = {name for name, *_ in ActDesc._fields_} - {"kind", "gated"}
_ROUTER = {name for name, *_ in RouterDesc._fields_}


class ExpertOptions(TypedDict, total=False):
    """What one expert computes, and how. Every option may be left out."""

    act: str  #: "swiglu" (the default), "geglu", ...; not gated: "silu", "relu2", ...
    alpha: float
    beta: float
    gate_max: float
    up_min: float
    up_max: float
    up_offset: float
    up_beta: float
    layout: str  #: "concat_gate_first" (the default), "concat_up_first", "interleaved"
    interleave: int
    transposed: bool  #: matrices are [in, out] by expert instead of [out, in]
    weight_on_input: bool
    recompute: bool  #: keep only the row map for backward, and compute h again: the same bits
    sm_limit: int  #: multiprocessors (CPU: threads) that calls may hold; 0, the default: all


class RouterOptions(TypedDict, total=False):
    """How experts are chosen, weighed and kept balanced. Every option may be left out."""

    score: str  #: "softmax" (the default), "topk_softmax", "sigmoid", "sqrt_softplus"
    renormalize: bool
    renorm_epsilon: float
    scale: float
    groups: int
    topk_groups: int
    group_score: str  #: "max" (the default), "top2_sum", "topk_sum"
    balance: str  #: "none" (the default), "batch", "sequence", "global"
    balance_coeff: float
    z_coeff: float
    sequence_tokens: int
    capacity_factor: float
    drop: str  #: "weight" (the default), "position"


def config_fields(options: Mapping[str, object]) -> dict:
    """The keywords of ``make_config`` that options stand for. Names are the caller's to check."""
    act: dict[str, object] = {"kind": options.get("act", "swiglu")}
    router: dict[str, object] = {}
    fields: dict[str, object] = {"act": act, "router": router}
    for name, value in options.items():
        if name == "recompute":
            fields[name] = "h" if value else "none"
        elif name != "act":
            (act if name in _ACT else router if name in _ROUTER else fields)[name] = value
    return fields
