# SPDX-License-Identifier: Apache-2.0
"""Peers in Triton: Liger's fused experts, and ScatterMoE."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from case import Case
from peer import Forward, Peer, load, wants_cuda


class Liger(Peer):
    """liger_kernel.ops.fused_moe; it tunes for more than a minute at each new shape."""

    name = "liger"

    def open(self, device: str) -> None:
        wants_cuda(device)
        self.function = load("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def bind(self, case: Case) -> Forward:
        return lambda x, p, w1, w2: self.function.apply(x, w1, w2, case.ids, p)


class ScatterMoE(Peer):
    """Two parallel_linear with the activation between them, as its GLUMLP does it."""

    name = "scattermoe"

    def open(self, device: str) -> None:
        wants_cuda(device)
        self.experts = load("scattermoe.parallel_experts")

    def bind(self, case: Case) -> Forward:
        linear, ids, problem = self.experts.parallel_linear, case.ids.long(), case.problem

        def forward(
            x: torch.Tensor, p: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
        ) -> torch.Tensor:
            rows = self.experts.flatten_sort_count(ids, num_experts=problem.experts)
            h = linear(x, w1.transpose(1, 2), problem.topk, *rows, grouped_out=True)
            gate, up = h.chunk(2, -1)
            return linear(F.silu(gate) * up, w2.transpose(1, 2), 1, *rows, grouped_in=True, gates=p)

        return forward
