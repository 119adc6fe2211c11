#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The error of moeblas' bf16 experts over that of torch's, both against fp64 of the same inputs.

    python bench/accuracy/torch_bf16.py --csv bench/results/accuracy_bf16_cpu.csv

Idea: torch's layer is its eager loop over the experts (matmul, silu, index_add), as Transformers
has it. Routing and its weights are given and the same for both. Errors are norms over whole
tensors, so that a ratio is not one element's luck (but for tensors of a few numbers).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import moeblas.torch

NAMES = ("out", "dx", "dweights", "dw1", "dw2")
# tokens, hidden, inter, experts, topk
SHAPES = [
    (t, h, f, e, k)
    for t in (1, 16, 128, 512)
    for h, f, e, k in (
        (64, 48, 8, 2), (128, 704, 4, 1), (256, 128, 16, 4), (512, 192, 32, 8),
        (720, 720, 8, 4), (1024, 384, 16, 2), (96, 1408, 4, 2), (2048, 128, 8, 6),
    )
]  # fmt: skip


def eager(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The experts as a loop: x [T,H], ids and weights [T,k], w1 [E,2F,H], w2 [E,H,F]."""
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        token, slot = torch.where(ids == expert)
        gate, up = F.linear(x[token], w1[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, w2[expert]) * weights[token, slot, None]
        out = out.index_add(0, token, rows)
    return out


def data(shape: tuple[int, ...], seed: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """x, weights, w1, w2 in bf16 (numbers of unit scale), ids, and the gradient of the output."""
    tokens, hidden, inter, experts, topk = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=draw)
    top = torch.randn(tokens, experts, generator=draw).softmax(-1).topk(topk)
    w1 = torch.randn(experts, 2 * inter, hidden, generator=draw) / hidden**0.5
    w2 = torch.randn(experts, hidden, inter, generator=draw) / inter**0.5
    dout = torch.randn(tokens, hidden, generator=draw)
    inputs = [v.to(device, torch.bfloat16) for v in (x, top.values, w1, w2)]
    return inputs, top.indices.to(device), dout.to(device, torch.bfloat16)


def results(
    layer: Callable[..., Tensor],
    inputs: list[Tensor],
    ids: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Output and gradients, in fp64."""
    x, weights, w1, w2 = leaves = [v.to(dtype).requires_grad_() for v in inputs]
    out = layer(x, ids, weights, w1, w2)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return [v.detach().double() for v in (out, *grads)]


def compare(shape: tuple[int, ...], seed: int, device: str) -> list[dict[str, str]]:
    """One row a tensor: relative errors of both, their ratio."""
    inputs, ids, dout = data(shape, seed, device)
    truth = results(eager, inputs, ids, dout, torch.float64)
    torchs = results(eager, inputs, ids, dout, torch.bfloat16)
    ours = results(moeblas.torch.experts, inputs, ids, dout, torch.bfloat16)
    rows = []
    for name, exact, theirs, own in zip(NAMES, truth, torchs, ours, strict=True):
        scale = exact.norm()
        error, torch_error = ((v - exact).norm() / scale for v in (own, theirs))
        rows.append({
            "shape": "t%d h%d f%d e%d k%d" % shape, "tensor": name, "moeblas": f"{error:.4e}",
            "torch": f"{torch_error:.4e}", "ratio": f"{error / torch_error:.4f}",
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        rows += compare(shape, options.seed, options.device)
    with options.csv.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for name in (*NAMES, "all"):
        of = [row for row in rows if name in ("all", row["tensor"])]
        ratios = [float(row["ratio"]) for row in of]
        worst = max(of, key=lambda row: float(row["ratio"]))
        median = statistics.median(ratios)
        print(f"{name}: median {median:.3f}, worst {max(ratios):.3f} ({worst['shape']})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
