# SPDX-License-Identifier: Apache-2.0
"""SonicMoE (CuTe DSL on QuACK), its experts alone. Gate and up rows interleaved, p in fp32.

QuACK's search over every tile takes longer than ten minutes a shape, and its worker processes
hung where we ran it; so the tiles that ever won are tried, compiled in this process.
"""

from __future__ import annotations

import os

import torch

from case import Case
from peer import Forward, Peer, load, wants_cuda

TILES = (
    (128, 192, True),
    (256, 128, False),
    (128, 256, False),
    (128, 128, True),
    (256, 192, False),
    (128, 160, True),
)


class Sonic(Peer):
    """sonicmoe.functional with routing metadata by its own Triton kernels."""

    name = "sonicmoe"
    weight_dtype = torch.float32

    def open(self, device: str) -> None:
        wants_cuda(device)
        os.environ.setdefault("QUACK_COMPILE_WORKERS", "1")
        config = load("quack.gemm_config")

        def tiles(epilogue: str | None = None, tune_coop: bool = True) -> list[object]:
            return [
                config.GemmConfig(
                    tile_m=m,
                    tile_n=n,
                    pingpong=pingpong,
                    cluster_m=2,
                    cluster_n=1,
                    swap_ab=False,
                    device_capacity=9,
                    is_dynamic_persistent=False,
                    use_tma_gather=False,
                )
                for m, n, pingpong in TILES
            ]

        config._get_sm90_configs = tiles
        self.sonic = load("sonicmoe.functional")
        self.swiglu = load("sonicmoe.enums").ActivationType.SWIGLU

    def arrange(self, w1: torch.Tensor) -> torch.Tensor:
        experts, twice, hidden = w1.shape
        return w1.view(experts, 2, twice // 2, hidden).transpose(1, 2).reshape(w1.shape)

    def restore(self, dw1: torch.Tensor) -> torch.Tensor:
        experts, twice, hidden = dw1.shape
        return dw1.view(experts, twice // 2, 2, hidden).transpose(1, 2).reshape(dw1.shape)

    def bind(self, case: Case) -> Forward:
        sonic, swiglu, ids, problem = self.sonic, self.swiglu, case.ids, case.problem
        experts, rows, topk = problem.experts, problem.rows, problem.topk

        def forward(
            x: torch.Tensor, p: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
        ) -> torch.Tensor:
            def empty(count: int) -> torch.Tensor:
                return torch.empty(count, dtype=torch.int32, device=x.device)

            scatter, reverse, gather = (empty(rows) for _ in range(3))
            count, offset = empty(experts), empty(experts + 1)
            sonic.TC_topk_router_metadata_triton(
                ids, experts, count, offset, gather, scatter, reverse
            )
            a, h = sonic._UpProjection.apply(
                x,
                w1.permute(1, 2, 0),
                None,
                offset,
                rows,
                topk,
                gather,
                scatter,
                reverse,
                None,
                False,
                swiglu,
                False,
                False,
            )
            return sonic._DownProjection.apply(
                a,
                h,
                w2.permute(1, 2, 0),
                None,
                p,
                offset,
                problem.tokens,
                topk,
                gather,
                scatter,
                reverse,
                None,
                False,
                swiglu,
            )

        return forward
