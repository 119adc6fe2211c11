# SPDX-License-Identifier: Apache-2.0
"""The implementations of the experts that `--moe` chooses from; what cannot run says why.

`eager` and `grouped_mm` are those of Transformers; `sonicmoe` is Transformers' too, and loads a
kernel package; `moeblas` and `liger` are registered here.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATIONS = ("moeblas", "grouped_mm", "eager", "liger", "sonicmoe")


class Refused(Exception):
    """An implementation that cannot run here, or not this model; says why."""


def _moeblas(model: str) -> None:
    try:
        import moeblas.hf
    except (ImportError, OSError) as error:
        raise Refused(f"moeblas: {error}") from error
    moeblas.hf.register()


def _plain_swiglu(implementation: str, model: str) -> None:
    if model == "gpt-oss":
        raise Refused(
            f"{implementation}: GPT-OSS's experts have biases, limits and interleaved halves; "
            "its function computes plain SwiGLU without them"
        )


def _liger(model: str) -> None:
    _plain_swiglu("liger", model)
    if not torch.cuda.is_available():
        raise Refused("liger: its Triton kernels need a GPU, found none")
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    except ImportError as error:
        raise Refused(f"liger: {error}") from error

    def forward(
        self: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        weights = weights.to(hidden.dtype)
        return LigerFusedMoEFunction.apply(hidden, self.gate_up_proj, self.down_proj, ids, weights)

    ALL_EXPERTS_FUNCTIONS.register("liger", forward)


def _sonicmoe(model: str) -> None:
    _plain_swiglu("sonicmoe", model)
    try:
        from transformers.integrations.sonicmoe import load_sonicmoe_kernel

        load_sonicmoe_kernel()
    except Exception as error:  # missing package, no network, no build for this torch
        raise Refused(f"sonicmoe: {error}") from error


def prepare(implementation: str, model: str) -> None:
    """Makes ``implementation`` known to Transformers, or raises Refused with the reason."""
    setup = {"moeblas": _moeblas, "liger": _liger, "sonicmoe": _sonicmoe}.get(implementation)
    if setup is not None:
        setup(model)
