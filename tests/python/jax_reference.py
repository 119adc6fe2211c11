# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer on ``jax.lax.ragged_dot``, in float32, for comparison.

Independent of the library: rows are sorted by expert with jnp, JAX differentiates. It knows the
part of the options that the tests use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def activation(h, act="swiglu", layout="concat_gate_first", gate_max=0, up_min=0, up_max=0, **rest):
    """[R,2F] or [R,F] to [R,F]; the formulas of moe_act_desc."""
    plain = {
        "relu2": lambda v: jax.nn.relu(v) ** 2,
        "gelu": lambda v: jax.nn.gelu(v, approximate=False),
    }
    if act in plain:
        return plain[act](h)
    if layout == "interleaved":
        pairs = h.reshape(h.shape[0], -1, 2, rest.get("interleave", 1))
        gate, up = (pairs[:, :, i].reshape(h.shape[0], -1) for i in (0, 1))
    else:
        gate, up = jnp.split(h, 2, axis=1)
        if layout == "concat_up_first":
            gate, up = up, gate
    if gate_max:
        gate = jnp.minimum(gate, gate_max)
    if up_max:
        up = jnp.clip(up, up_min, up_max)
    f = {"swiglu": lambda v: v * jax.nn.sigmoid(rest.get("alpha", 1) * v), "geglu": plain["gelu"]}
    return f[act](gate) * (up + rest.get("up_offset", 0))


def experts(
    x, ids, weights, w1, w2, b1=None, b2=None, transposed=False, weight_on_input=False, **act
):
    """As ``moeblas.jax.experts``, on float32 arrays."""
    if not transposed:
        w1, w2 = w1.swapaxes(1, 2), w2.swapaxes(1, 2)
    count, topk = w1.shape[0], ids.shape[1]
    flat = ids.reshape(-1)
    valid = (flat >= 0) & (flat < count)
    order = jnp.argsort(jnp.where(valid, flat, count), stable=True)
    expert, valid = jnp.clip(flat[order], 0, count - 1), valid[order][:, None]
    sizes = jnp.zeros(count, jnp.int32).at[expert].add(valid[:, 0].astype(jnp.int32))
    weight = weights.reshape(-1, 1)[order]
    h = jax.lax.ragged_dot(x[order // topk], w1, sizes, precision=HIGHEST)
    h = h * weight if weight_on_input else h
    h = h if b1 is None else h + b1[expert]
    y = jax.lax.ragged_dot(activation(h, **act), w2, sizes, precision=HIGHEST)
    y = y if b2 is None else y + b2[expert]
    y = jnp.where(valid, y if weight_on_input else y * weight, 0)
    return jnp.zeros_like(x).at[order // topk].add(y)


def router_weights(logits, ids, score="softmax", renormalize=False, scale=1.0):
    """Weights [T,k] of the chosen experts, from logits [T,E]; 0 for ids outside."""
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[score](logits)
    chosen = jnp.take_along_axis(scores, jnp.clip(ids, 0, logits.shape[1] - 1), 1)
    chosen = jnp.where(ids >= 0, chosen, 0)
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdims=True) + 1e-20)
    return chosen * scale


def _per_sequence(array, length):
    """[T,...] as sums over runs of ``length`` tokens, [S,...]; the last run may be shorter."""
    padded = jnp.pad(array, [(0, -array.shape[0] % length)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(-1, length, *array.shape[1:]).sum(1)


def balance_loss(logits, ids, valid, score, length):
    """E * sum_e f_e P_e for each run of ``length`` tokens, averaged over those with a valid token.

    f_e: share of the slots that chose e; P_e: mean of the normalised scores (arXiv:2101.03961,
    eq. 4).
    """
    elementwise = {
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda z: jnp.sqrt(jax.nn.softplus(z)),
    }
    scores = elementwise.get(score, jax.nn.softmax)(logits)
    scores = scores / scores.sum(1, keepdims=True) * valid[:, None]
    chosen = jax.nn.one_hot(ids, logits.shape[1]).sum(1) * valid[:, None]
    tokens = _per_sequence(valid.astype(jnp.float32), length)
    divisor = jnp.maximum(tokens, 1)[:, None]
    fraction = _per_sequence(chosen, length) / (divisor * ids.shape[1])
    share = _per_sequence(scores, length) / divisor
    return logits.shape[1] * (fraction * share).sum() / (tokens > 0).sum()


def z_loss(logits, valid):
    """Mean over the valid tokens of the squared logsumexp (arXiv:2202.08906)."""
    return (jax.nn.logsumexp(logits, axis=1) ** 2 * valid).sum() / valid.sum()
