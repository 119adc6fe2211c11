# SPDX-License-Identifier: Apache-2.0
"""torch's grouped_mm, eager and compiled, with the two ways to combine rows: gather and sum (faster
forward), or index_add (faster backward); and the experts of Transformers as it runs them eagerly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from case import Case
from peer import Absent, Forward, Peer, load


def layer(
    x: torch.Tensor,
    p: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    gather: bool,
) -> torch.Tensor:
    """The layer by grouped_mm: x [T,H], p and ids [T,k], w1 [E,2F,H], w2 [E,H,F].

    Nothing waits for the device: offsets come from a search in the sorted ids, not from bincount.
    """
    topk = ids.shape[1]
    slots = ids.reshape(-1)
    order = slots.argsort(stable=True)
    token = order // topk
    experts = torch.arange(w1.shape[0], device=x.device, dtype=slots.dtype)
    ends = torch.searchsorted(slots[order], experts, right=True, out_int32=True)
    gate, up = F.grouped_mm(x[token], w1.transpose(1, 2), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    y = y * p.reshape(-1)[order].unsqueeze(-1)
    if not gather:
        return torch.zeros_like(x).index_add_(0, token, y)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=x.device)
    return y[row].view(*ids.shape, -1).sum(1)


class Grouped(Peer):
    """torch alone."""

    def __init__(self, compiled: bool, gather: bool) -> None:
        self.compiled, self.gather = compiled, gather
        self.name = f"torch{'-compile' if compiled else ''}-{'gather' if gather else 'add'}"
        self.layer = layer

    def open(self, device: str) -> None:
        if not hasattr(F, "grouped_mm"):
            raise Absent(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
        if self.compiled:
            self.layer = torch.compile(layer, dynamic=False)

    def bind(self, case: Case) -> Forward:
        if self.compiled and case.problem.dtype != torch.bfloat16:
            raise Absent("grouped_mm is compiled for bf16 alone")
        return lambda x, p, w1, w2: self.layer(x, p, w1, w2, case.ids, self.gather)


class Transformers(Peer):
    """The experts of Qwen3-MoE: a Python loop over the experts that have tokens."""

    name = "transformers-eager"

    def open(self, device: str) -> None:
        self.model = load("transformers.models.qwen3_moe.modeling_qwen3_moe")
        self.config = load("transformers").Qwen3MoeConfig

    def bind(self, case: Case) -> Forward:
        problem, ids = case.problem, case.ids.long()
        config = self.config(
            hidden_size=problem.hidden,
            moe_intermediate_size=problem.inter,
            num_experts=problem.experts,
            num_experts_per_tok=problem.topk,
            hidden_act="silu",
        )
        config._experts_implementation = "eager"
        with torch.device("meta"):
            experts = self.model.Qwen3MoeExperts(config)

        def forward(
            x: torch.Tensor, p: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
        ) -> torch.Tensor:
            weights = {"gate_up_proj": w1, "down_proj": w2}
            return torch.func.functional_call(experts, weights, (x, ids, p))

        return forward
