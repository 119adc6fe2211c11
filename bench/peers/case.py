# SPDX-License-Identifier: Apache-2.0
"""Problem strings for the peers, their data, and the reference that every peer is held against.

The strings are those of `moeblas bench` (docs/problems.md), cut down to what peers can do: given
ids and weights, SwiGLU with gate rows before up rows. A field that would be ignored is refused.
Data are random and made anew for each problem; the weights p are representable in the problem's
type, so that all peers compute the same function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SKEWS = ("uniform", "zipf", "one", "empty")
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Problem:
    """One layer. `name` is the comment behind the line, for people and --only."""

    tokens: int = 64
    hidden: int = 64
    inter: int = 48
    experts: int = 8
    topk: int = 2
    dtype: torch.dtype = torch.float32
    backward: bool = False
    skew: str = "uniform"
    seed: int = 1
    name: str = ""

    @property
    def text(self) -> str:
        """The string as the column `problem` of every table has it: without `bwd`."""
        dtype = next(word for word, value in DTYPES.items() if value == self.dtype)
        skew = "" if self.skew == "uniform" else f" skew={self.skew}"
        seed = "" if self.seed == 1 else f" seed={self.seed}"
        sizes = f"t{self.tokens} h{self.hidden} f{self.inter} e{self.experts} k{self.topk}"
        return f"{sizes} {dtype} swiglu given{skew}{seed}"

    @property
    def rows(self) -> int:
        """R = T k."""
        return self.tokens * self.topk

    def flops(self, backward: bool) -> float:
        """Operations of a pass: 6 R H F forward, twice that backward."""
        return 6.0 * self.rows * self.hidden * self.inter * (2 if backward else 1)

    def bytes(self, backward: bool, experts: int) -> float:
        """Bytes that must move, counted as `moeblas bench` does; `experts` have rows."""
        expert = 3 * self.inter * self.hidden
        h = 2 * self.rows * self.inter if self.backward else 0
        count = experts * expert + 2 * self.tokens * self.hidden + h
        if backward:
            count += self.tokens * self.hidden + self.experts * expert
        return float(count * self.dtype.itemsize)


def parse(line: str) -> Problem | None:
    """The problem of one line, or None if it has only a comment.

    Raises ValueError with the word that is not understood.
    """
    text, _, comment = line.partition("#")
    fields: dict[str, object] = {"name": comment.strip()}
    words = text.split()
    sizes = {"t": "tokens", "h": "hidden", "f": "inter", "e": "experts", "k": "topk"}
    for word in words:
        if match := re.fullmatch(r"([thfek])([1-9][0-9]*)", word):
            fields[sizes[match[1]]] = int(match[2])
        elif word in DTYPES:
            fields["dtype"] = DTYPES[word]
        elif word == "bwd":
            fields["backward"] = True
        elif match := re.fullmatch(r"seed=([0-9]+)", word):
            fields["seed"] = int(match[1])
        elif word.startswith("skew=") and word[5:] in SKEWS:
            fields["skew"] = word[5:]
        elif word not in ("swiglu", "given"):
            raise ValueError(
                f"'{word}': peers know sizes, types, swiglu, given, bwd, skew= and seed="
            )
    if words and "given" not in words:
        raise ValueError(f"'{text.strip()}': wants 'given', as peers are given ids and weights")
    return Problem(**fields) if words else None  # type: ignore[arg-type]


def read(arguments: list[str]) -> list[Problem]:
    """All problems of the command line: strings, and @FILE for a file with one a line."""
    problems = []
    for argument in arguments:
        lines = [argument]
        if argument.startswith("@"):
            with open(argument[1:], encoding="utf-8") as file:
                lines = file.read().splitlines()
        problems += [problem for line in lines if (problem := parse(line))]
    return problems


@dataclass
class Case:
    """A problem with its data: x, dout [T,H]; w1 [E,2F,H]; w2 [E,H,F]; ids int32, p fp32 [T,k]."""

    problem: Problem
    x: torch.Tensor
    ids: torch.Tensor
    p: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    dout: torch.Tensor

    @property
    def experts_in_use(self) -> int:
        """Experts that have rows."""
        return int(self.ids.unique().numel())


def draw_ids(problem: Problem, device: str) -> torch.Tensor:
    """k distinct experts a token, drawn by the shares of the skew (Gumbel's trick): int32 [T,k]."""
    e = torch.arange(problem.experts, device=device)
    share = {
        "uniform": torch.ones_like(e, dtype=torch.float32),
        "zipf": 1.0 / (e + 1),
        "one": (e == problem.seed % problem.experts).float(),
        "empty": (e % 2 == 0).float(),
    }[problem.skew]
    key = torch.rand(problem.tokens, problem.experts, device=device).log_().neg_().log_().neg_()
    key += share.log().clamp_min(-16)
    return key.topk(problem.topk, dim=-1).indices.to(torch.int32)


def make(problem: Problem, device: str) -> Case:
    """Random data of unit size: x and dout normal, weights normal with variance 1/in."""
    torch.manual_seed(problem.seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=problem.dtype, device=device).normal_(0, scale)

    t, h, f, e = problem.tokens, problem.hidden, problem.inter, problem.experts
    p = torch.rand(t, problem.topk, device=device) * (2 / problem.topk)
    return Case(
        problem,
        normal(t, h),
        draw_ids(problem, device),
        p.to(problem.dtype).float(),
        normal(e, 2 * f, h, scale=h**-0.5),
        normal(e, h, f, scale=f**-0.5),
        normal(t, h),
    )


def reference(case: Case) -> dict[str, torch.Tensor]:
    """The layer and its gradients in fp32, one expert at a time; kept in the problem's type."""
    x, p, w1, w2, dout = case.x, case.p, case.w1, case.w2, case.dout
    out, dx = (torch.zeros(x.shape, device=x.device) for _ in range(2))
    dp, dw1, dw2 = torch.zeros_like(p), torch.zeros_like(w1), torch.zeros_like(w2)
    for e in range(case.problem.experts):
        t, j = (case.ids == e).nonzero(as_tuple=True)
        a1, a2, xe, weight = w1[e].float(), w2[e].float(), x[t].float(), p[t, j][:, None]
        gate, up = (xe @ a1.T).chunk(2, -1)
        s = gate.sigmoid()
        a = gate * s * up
        out.index_add_(0, t, weight * (a @ a2.T))
        if not case.problem.backward:
            continue
        g = dout[t].float()
        da = g @ a2
        dp[t, j] = (da * a).sum(-1)
        da *= weight
        dw2[e] = ((weight * g).T @ a).to(dw2.dtype)
        dh = torch.cat((da * up * s * (1 + gate * (1 - s)), da * gate * s), -1)
        dw1[e] = (dh.T @ xe).to(dw1.dtype)
        dx.index_add_(0, t, dh @ a1)
    result = {"out": out.to(x.dtype)}
    if case.problem.backward:
        result |= {"dx": dx.to(x.dtype), "dp": dp, "dw1": dw1, "dw2": dw2}
    return result


def error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """|result - wanted| / |wanted| in Frobenius norms; in pieces, to need no large fp32 copy."""
    difference = total = 0.0
    for a, b in zip(result.reshape(-1).split(1 << 26), wanted.reshape(-1).split(1 << 26)):
        difference += float((a.float() - b.float()).square().sum(dtype=torch.float64))
        total += float(b.float().square().sum(dtype=torch.float64))
    return (difference / total) ** 0.5 if total else difference**0.5


def compare(
    results: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[bool, str]:
    """(whether every result is near enough, a note that names the farthest).

    The limits tell a wrong function from the right one; how well a peer rounds is in the note.
    """
    off = {name: error(results[name], tensor) for name, tensor in wanted.items()}
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"))
    return off[worst] <= LIMITS[dtype], f"{worst} off by {off[worst]:.1e}"
