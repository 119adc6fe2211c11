# SPDX-License-Identifier: Apache-2.0
"""The layer once more, in plain NumPy and fp64, from the formulas of moeblas.h; no gradients.

A gradient is checked against central differences of ``loss``, with the experts chosen held fixed:
in fp64 they are good to about nine digits, and share no code with what they check.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


SCORES = {
    "softmax": softmax,
    "topk_softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": lambda z: np.sqrt(np.log1p(np.exp(z))),
}
ACTIVATIONS = {
    "silu": lambda x, alpha: x * sigmoid(alpha * x),
    "relu2": lambda x, alpha: np.maximum(x, 0) ** 2,
    "gelu_tanh": lambda x, alpha: (
        0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    ),
}


def halves(h, inter, layout, interleave):
    """Gate and up halves of [R,2F]."""
    if layout == "interleaved":
        h = h.reshape(len(h), inter // interleave, 2, interleave)
        return h[:, :, 0].reshape(-1, inter), h[:, :, 1].reshape(-1, inter)
    first, second = h[:, :inter], h[:, inter:]
    return (second, first) if layout == "concat_up_first" else (first, second)


def activate(h, act, inter):
    """a = f(gate) * up, or f(h). ``act`` is the mapping given to make_config, kind always plain."""
    f = ACTIVATIONS[act["kind"]]
    alpha = act.get("alpha", 1)
    if not act.get("gated"):
        return f(h, alpha)
    gate, up = halves(h, inter, act.get("layout"), act.get("interleave", 1))
    gate = np.minimum(gate, act.get("gate_max", np.inf))
    up = np.clip(up, act.get("up_min", -np.inf), act.get("up_max", np.inf))
    return f(gate, alpha) * (up + act.get("up_offset", 0))


def choose(z, router, topk, correction):
    """Ids of the experts of largest key, best first."""
    key = z if router["score"] == "topk_softmax" else SCORES[router["score"]](z) + correction
    groups = router.get("groups", 1)
    if groups > 1:
        best = np.sort(key.reshape(len(z), groups, -1), axis=2)[:, :, ::-1]
        worth = best[:, :, :2].sum(2) if router.get("group_score") == "top2_sum" else best[:, :, 0]
        kept = np.argsort(-worth, axis=1, kind="stable")[:, : router["topk_groups"]]
        inside = np.zeros((len(z), groups), bool)
        np.put_along_axis(inside, kept, True, 1)
        key = np.where(np.repeat(inside, key.shape[1] // groups, axis=1), key, -np.inf)
    return np.argsort(-key, axis=1, kind="stable")[:, :topk]


def weigh(z, router, ids):
    """The weights of the chosen experts."""
    if router["score"] == "topk_softmax":
        p = softmax(np.take_along_axis(z, ids, 1))
    else:
        p = np.take_along_axis(SCORES[router["score"]](z), ids, 1)
    if router.get("renormalize"):
        p = p / (p.sum(1, keepdims=True) + router.get("renorm_epsilon", 1e-20))
    return p * router.get("scale", 1)


def router_losses(z, router, ids, valid):
    """Balancing loss over the tokens of the call, and z-loss."""
    experts = z.shape[1]
    z, ids = z[valid], ids[valid]
    share = np.bincount(ids.ravel(), minlength=experts) / ids.size
    scores = SCORES[router["score"]](z)
    mean = (scores / scores.sum(1, keepdims=True)).mean(0)
    log_sum = np.log(np.exp(z).sum(1))
    return np.array(
        [
            router.get("balance_coeff", 0) * experts * (share * mean).sum(),
            router.get("z_coeff", 0) * (log_sum**2).mean(),
        ]
    )


def experts(x, ids, weights, p, config):
    """Sum over the choices of each token; an id outside 0 .. E-1 adds nothing."""
    out = np.zeros((len(x), p["w2"].shape[2 if config.get("transposed") else 1]))
    for e in range(config["experts"]):
        token, slot = np.nonzero(ids == e)
        weight = weights[token, slot][:, None]
        w1, w2 = p["w1"][e], p["w2"][e]
        w1, w2 = (w1, w2) if config.get("transposed") else (w1.T, w2.T)
        early = weight if config.get("weight_on_input") else 1
        h = early * (x[token] @ w1) + (p["b1"][e] if "b1" in p else 0)
        y = activate(h, config["act"], config["inter"]) @ w2 + (p["b2"][e] if "b2" in p else 0)
        np.add.at(out, token, y if config.get("weight_on_input") else weight * y)
    return out


def shared(x, p, config):
    """The shared expert, under its gate if there is one."""
    w1, w2 = p["shared_w1"], p["shared_w2"]
    w1, w2 = (w1, w2) if config.get("transposed") else (w1.T, w2.T)
    y = activate(x @ w1, config["act"], config["shared_inter"]) @ w2
    return y * sigmoid(x @ p["shared_gate"])[:, None] if "shared_gate" in p else y


def layer(inputs, p, config, ids=None):
    """(out, ids, weights, losses) of a layer that is not entered with rows; all arrays in fp64."""
    x = inputs["x"]
    losses = np.zeros(2)
    valid = ~inputs.get("padding_mask", np.zeros(len(x), bool)).astype(bool)
    if config.get("entry") == "ids":
        ids, weights = inputs["given_ids"], inputs["given_weights"]
    else:
        router = {"score": "softmax", **config.get("router", {})}
        z = inputs["logits"] if "logits" in inputs else x @ p["router_weight"].T
        z = z + p.get("router_bias", 0)
        if ids is None:
            ids = choose(z, router, config["topk"], p.get("correction_bias", 0))
        weights = weigh(z, router, ids)
        losses = router_losses(z, router, ids, valid)
    used = np.where(valid[:, None], ids, -1)
    routed = x
    if config.get("latent"):
        down, up = p["latent_down"], p["latent_up"]
        down, up = (down, up) if config.get("transposed") else (down.T, up.T)
        routed = x @ down
    out = experts(routed, used, weights, p, config)
    if config.get("latent"):
        out = out @ up
    if config.get("shared_inter"):
        out = out + valid[:, None] * shared(x, p, config)
    return out, used, weights, losses


def gradient(f, array, step=1e-5):
    """Central differences of the number f() in every element of an fp64 array."""
    grad = np.empty(array.shape)
    flat, out = array.reshape(-1), grad.reshape(-1)
    for i, kept in enumerate(flat.copy()):
        flat[i] = kept + step
        above = f()
        flat[i] = kept - step
        out[i] = (above - f()) / (2 * step)
        flat[i] = kept
    return grad
