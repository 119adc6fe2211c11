# SPDX-License-Identifier: Apache-2.0
"""The layer once more in plain PyTorch, for any type, differentiated by autograd; and how its
results are compared.

Run in fp64 it is what moeblas.torch is held to. It follows the formulas of moeblas.h with one
matrix product an expert and shares no code with the package. Capacity is given as the set of slots
that are kept.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Largest share of a tensor's norm that may be off. fp32: the longest sum here has 64 terms, 2e-7 of
# it is lost (docs/numerics.md) and as much in an activation (on CUDA 5e-7); five times that. Short
# types: a result passes at most 4 roundings forward and 6 backward (h, a, y, out; dh, p a, rows,
# dx) of half a unit in the last place.
FORWARD = {torch.float32: 2e-6, torch.bfloat16: 4 * 2**-9, torch.float16: 4 * 2**-12}
BACKWARD = {torch.float32: 4e-6, torch.bfloat16: 6 * 2**-9, torch.float16: 6 * 2**-12}

PLAIN = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _: torch.relu(x),
    "relu2": lambda x, _: torch.relu(x) ** 2,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
SCORES = {
    "softmax": lambda z: z.softmax(-1),
    "topk_softmax": lambda z: z.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda z: functional.softplus(z).sqrt(),
}


def halves(h, options):
    """Gate and up halves of [R,2F]."""
    layout = options.get("layout", "concat_gate_first")
    if layout == "interleaved":
        size = options.get("interleave", 1)
        h = h.reshape(h.shape[0], -1, 2, size)
        return h[:, :, 0].flatten(1), h[:, :, 1].flatten(1)
    first, second = h.chunk(2, -1)
    return (second, first) if layout == "concat_up_first" else (first, second)


def activate(h, options):
    """a = f(gate) (up + offset), or f(h)."""
    act, alpha = options.get("act", "swiglu"), options.get("alpha", 1)
    if act not in GATED:
        return PLAIN[act](h, alpha)
    gate, up = halves(h, options)
    if "gate_max" in options:
        gate = gate.clamp(max=options["gate_max"])
    if "up_min" in options:
        up = up.clamp(options["up_min"], options["up_max"])
    return PLAIN[GATED[act]](gate, alpha) * (up + options.get("up_offset", 0))


def mlp(x, w1, w2, b1, b2, weight, options):
    """One expert on its rows; ``weight`` [R,1] multiplies its input or its output."""
    if not options.get("transposed"):
        w1, w2 = w1.T, w2.T
    early = options.get("weight_on_input")
    h = x @ w1
    h = (h * weight if early else h) + (0 if b1 is None else b1)
    y = activate(h, options) @ w2 + (0 if b2 is None else b2)
    return y if early else y * weight


def experts(x, ids, weights, p, options):
    """Sum over the choices of each token; an id outside 0 .. E-1 adds nothing."""
    out = torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    for e in range(p["w1"].shape[0]):
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        b1, b2 = (p[name][e] if name in p else None for name in ("b1", "b2"))
        weight = weights[token, slot][:, None]
        y = mlp(x[token], p["w1"][e], p["w2"][e], b1, b2, weight, options)
        out = out.index_add(0, token, y)
    return out


def choose(z, topk, options, correction):
    """Ids of the experts of largest key, best first."""
    score = options.get("score", "softmax")
    key = z if score == "topk_softmax" else SCORES[score](z) + correction
    groups = options.get("groups", 1)
    if groups > 1:
        grouped = key.reshape(len(z), groups, -1)
        two = options.get("group_score") == "top2_sum"
        worth = grouped.topk(2, -1).values.sum(-1) if two else grouped.amax(-1)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(options["topk_groups"], -1).indices, 1)
        key = grouped.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    return key.topk(topk, -1).indices


def weigh(z, ids, options):
    """The weights of the chosen experts."""
    if options.get("score") == "topk_softmax":
        p = z.gather(1, ids).softmax(-1)
    else:
        p = SCORES[options.get("score", "softmax")](z).gather(1, ids)
    if options.get("renormalize"):
        p = p / (p.sum(1, keepdim=True) + options.get("renorm_epsilon", 1e-20))
    return p * options.get("scale", 1)


def balance_loss(z, ids, options, before=None):
    """coeff E sum_e f_e P_e of these tokens; ``before``: the counts of earlier calls (global)."""
    count = z.shape[1]
    chosen = torch.bincount(ids.flatten(), minlength=count).to(z.dtype)
    tokens = len(z)
    if before is not None:
        chosen, tokens = chosen + before[:-1], tokens + before[-1]
    scores = SCORES[options.get("score", "softmax")](z)
    mean = (scores / scores.sum(1, keepdim=True)).mean(0)
    share = chosen / (tokens * ids.shape[1])
    return options.get("balance_coeff", 0) * count * (share * mean).sum()


def losses(z, ids, valid, options, before=None):
    """Balancing loss and z-loss of the tokens that take part."""
    kind = options.get("balance", "none")
    balance = z.new_zeros(())
    if kind == "sequence":
        size = options["sequence_tokens"]
        parts = zip(z.split(size), ids.split(size), valid.split(size))
        balance = torch.stack([balance_loss(a[c], b[c], options) for a, b, c in parts]).mean()
    elif kind != "none":
        before = before if kind == "global" else None
        balance = balance_loss(z[valid], ids[valid], options, before)
    return balance, options.get("z_coeff", 0) * (z[valid].logsumexp(-1) ** 2).mean()


def moe(x, p, topk, options, mask=None, before=None, ids=None):
    """(out, ids, weights, balancing loss, z-loss) of the whole layer."""
    z = x @ p["router_weight"].T + p.get("router_bias", 0)
    if ids is None:
        ids = choose(z.detach(), topk, options, p.get("correction_bias", 0))
    ids = ids.long().clamp(min=0)  # those of masked tokens are not used
    weights = weigh(z, ids, options)
    valid = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else ~mask
    balance, zloss = losses(z, ids, valid, options, before)
    used = torch.where(valid[:, None], ids, -1)
    turned = options.get("transposed")
    inner = x
    if "latent_down" in p:
        inner = x @ (p["latent_down"] if turned else p["latent_down"].T)
    out = experts(inner, used, weights, p, options)
    if "latent_up" in p:
        out = out @ (p["latent_up"] if turned else p["latent_up"].T)
    if "shared_w1" in p:
        gate = torch.sigmoid(x @ p["shared_gate"])[:, None] if "shared_gate" in p else 1
        ones = x.new_ones(len(x), 1)
        shared = mlp(x, p["shared_w1"], p["shared_w2"], None, None, ones, options)
        out = out + valid[:, None] * gate * shared
    return out, used, weights, balance, zloss


def assert_close(found, wanted, limit, what=""):
    """The tensor within ``limit`` of its norm, each row within 8 of its own or the typical one."""
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape, what
    assert torch.isfinite(found).all(), what
    if wanted.numel() == 0:
        return
    error = (found - wanted).norm()
    assert error <= limit * wanted.norm(), f"{what}: {error / wanted.norm():.3g} of {limit:.3g}"
    rows, off = wanted.reshape(-1, wanted.shape[-1]), (found - wanted).reshape(-1, wanted.shape[-1])
    typical = rows.norm() / rows.shape[0] ** 0.5
    worst = (off.norm(dim=1) / rows.norm(dim=1).clamp(min=typical)).nan_to_num().max()
    assert worst <= 8 * limit, f"{what}: a row is off by {worst:.3g}, limit {8 * limit:.3g}"
