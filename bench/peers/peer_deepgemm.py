# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's grouped products alone, beside our ops: up, down, and dw1 accumulating into fp32.

Its rows are gathered and padded to its alignment beforehand, untimed; operations count the true
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from case import Case, error
from peer import Absent, load, wants_cuda

LIMIT = 1e-2


@dataclass
class Product:
    """One product: the call, and how far its result for the busiest expert is from torch's."""

    passes: str
    impl: str
    call: Callable[[], object]
    flops: float
    bytes: float
    off: float


def padded_rows(case: Case, alignment: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """(rows of each expert, padded rows of each, int32 expert of each padded row or -1)."""
    counts = torch.bincount(case.ids.reshape(-1).long(), minlength=case.problem.experts)
    padded = (counts + alignment - 1) // alignment * alignment
    expert = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), padded)
    start = torch.repeat_interleave(padded.cumsum(0) - padded, padded)
    place = torch.arange(len(expert), device=counts.device) - start
    layout = torch.where(place < counts[expert], expert, torch.full_like(expert, -1)).to(
        torch.int32
    )
    return counts.tolist(), padded, layout


def random_rows(layout: torch.Tensor, width: int) -> torch.Tensor:
    """Unit normal bf16 rows, 0 where the layout has padding."""
    rows = torch.randn(len(layout), width, dtype=torch.bfloat16, device=layout.device)
    return rows.mul_((layout >= 0)[:, None])


class DeepGEMM:
    """The three products on random rows."""

    name = "deepgemm"

    def open(self, device: str) -> None:
        """Loads it. Raises Absent with the reason."""
        wants_cuda(device)
        self.dg = load("deep_gemm")

    def products(self, case: Case) -> Iterator[Product]:
        """Each product, run once and compared. Raises Absent if the type is not its own."""
        if case.problem.dtype != torch.bfloat16:
            raise Absent("its products are timed in bf16")
        alignment = self.dg.get_mk_alignment_for_contiguous_layout()
        counts, padded, layout = padded_rows(case, alignment)
        sizes = padded.tolist()
        busiest = max(range(len(counts)), key=counts.__getitem__)
        first = sum(sizes[:busiest])
        part = slice(first, first + counts[busiest])
        for impl, weight in (("up", case.w1), ("down", case.w2)):
            yield self.rows_product(case, impl, weight, layout, busiest, part)
        yield self.weight_product(case, sizes, layout, busiest, part)

    def rows_product(
        self,
        case: Case,
        impl: str,
        weight: torch.Tensor,
        layout: torch.Tensor,
        busiest: int,
        part: slice,
    ) -> Product:
        """Rows by the weights of their expert."""
        n, k = weight.shape[1:]
        a, d = (
            random_rows(layout, k),
            torch.empty(len(layout), n, dtype=weight.dtype, device=weight.device),
        )

        def call() -> None:
            self.dg.m_grouped_bf16_gemm_nt_contiguous(a, weight, d, layout)

        call()
        off = error(d[part], a[part].float() @ weight[busiest].float().T)
        rows = case.problem.rows
        moved = 2.0 * (case.experts_in_use * n * k + rows * (n + k))
        return Product("fwd", f"{self.name} {impl}", call, 2.0 * rows * n * k, moved, off)

    def weight_product(
        self, case: Case, sizes: list[int], layout: torch.Tensor, busiest: int, part: slice
    ) -> Product:
        """Contraction over the rows of each expert, added to fp32."""
        m, n = case.w1.shape[1:]
        a, b = random_rows(layout, m), random_rows(layout, n)
        d = torch.zeros(case.problem.experts, m, n, device=a.device)
        counts = torch.tensor(sizes, dtype=torch.int32, device=a.device)

        def call() -> None:
            self.dg.k_grouped_bf16_gemm_tn_contiguous(a, b, d, sizes, counts, d)

        call()
        off = error(d[busiest], a[part].float().T @ b[part].float())
        rows = case.problem.rows
        moved = 8.0 * case.problem.experts * m * n + 2.0 * rows * (m + n)
        return Product("bwd", f"{self.name} dw1 += fp32", call, 2.0 * rows * m * n, moved, off)
