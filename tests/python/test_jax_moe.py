# SPDX-License-Identifier: Apache-2.0
"""moeblas.jax.moe against a layer on ragged_dot: router, shared expert, latent, losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp
import jax_helper as helper
import jax_reference as reference
import moeblas
import moeblas.jax as moe_jax
import moeblas.numpy
from jax_helper import assert_close, assert_same, on_cpu

device = helper.device

TOKENS, HIDDEN, INTER, EXPERTS, TOPK = 40, 32, 24, 8, 3


def arrays_of(dtype="float32", shared=0, latent=0, gate=False, seed=3):
    """Parameters by the names of moe, and x."""
    random = np.random.default_rng(seed)
    width = latent or HIDDEN
    shapes = {
        "x": (TOKENS, HIDDEN),
        "router_weight": (EXPERTS, HIDDEN),
        "w1": (EXPERTS, 2 * INTER, width),
        "w2": (EXPERTS, width, INTER),
    }
    if shared:
        shapes |= {"shared_w1": (2 * shared, HIDDEN), "shared_w2": (HIDDEN, shared)}
        shapes |= {"shared_gate": (HIDDEN,)} if gate else {}
    if latent:
        shapes |= {"latent_down": (latent, HIDDEN), "latent_up": (HIDDEN, latent)}
    scale = {"x": 1.0}
    return {
        name: jnp.asarray(random.standard_normal(shape) * scale.get(name, 0.2), jnp.dtype(dtype))
        for name, shape in shapes.items()
    }


def layer(a, ids, score="softmax", renormalize=False, scale=1.0):
    """The whole layer on arrays ``a`` for ids that are chosen already, -1 where masked."""
    dot = lambda left, right: jnp.matmul(left, right.T, precision=reference.HIGHEST)
    logits = dot(a["x"], a["router_weight"]) + a.get("router_bias", 0)
    weights = reference.router_weights(logits, ids, score, renormalize, scale)
    inner = dot(a["x"], a["latent_down"]) if "latent_down" in a else a["x"]
    out = reference.experts(inner, ids, weights, a["w1"], a["w2"], a.get("b1"), a.get("b2"))
    out = dot(out, a["latent_up"]) if "latent_up" in a else out
    if "shared_w1" in a:
        shared = dot(reference.activation(dot(a["x"], a["shared_w1"])), a["shared_w2"])
        gate = jax.nn.sigmoid(a["x"] @ a["shared_gate"])[:, None] if "shared_gate" in a else 1
        out = out + jnp.where(ids[:, :1] >= 0, shared * gate, 0)
    return out, weights


def expected_of(arrays, ids, dout, **router):
    value, pull, weights = jax.vjp(lambda a: layer(a, ids, **router), arrays, has_aux=True)
    return value, weights, pull(dout)[0]


def check(arrays, rest=None, run=moe_jax.moe, **options):
    """Choice, values and gradients of every float."""
    rest, dtype = rest or {}, arrays["x"].dtype
    router = {k: v for k, v in options.items() if k in ("score", "renormalize", "scale")}
    dout = (
        jnp.cos(jnp.arange(TOKENS * HIDDEN, dtype=jnp.float32))
        .reshape(TOKENS, HIDDEN)
        .astype(dtype)
    )

    def loss(arrays):
        out, aux = run(**arrays, **rest, topk=TOPK, **options)
        return (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(), (out, aux)

    (_, (out, aux)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)

    value, weights, expected = on_cpu(expected_of, arrays, aux.ids, dout, **router)
    assert_close(out, value, dtype, "out")
    assert_close(aux.weights, weights, dtype, "weights")
    assert_same(
        aux.counts, np.bincount(np.asarray(aux.ids)[np.asarray(aux.ids) >= 0], minlength=EXPERTS)
    )
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
        assert_close(grad, expected[name], dtype, f"d{name}")
    return aux


def keys(arrays, score):
    """What the experts are chosen by, [T,E]."""
    x, weight = (np.asarray(arrays[name], np.float64) for name in ("x", "router_weight"))
    logits = x @ weight.T
    return 1 / (1 + np.exp(-logits)) if score == "sigmoid" else logits


def best(keys):
    return np.sort(np.argsort(-keys, axis=1)[:, :TOPK], axis=1)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router(device, score, renormalize):
    arrays = arrays_of()
    aux = check(arrays, score=score, renormalize=renormalize, scale=2.5)
    assert_same(np.sort(aux.ids, axis=1), best(keys(arrays, score)))


def test_correction_bias_moves_the_choice_only(device):
    arrays, bias = arrays_of(), np.linspace(0, 0.5, EXPERTS)
    aux = check(arrays, {"correction_bias": jnp.asarray(bias)}, score="sigmoid")
    assert_same(np.sort(aux.ids, axis=1), best(keys(arrays, "sigmoid") + bias))


def test_groups_limit_the_choice(device):
    aux = check(arrays_of(), groups=4, topk_groups=2)
    assert max(len(set(row)) for row in np.asarray(aux.ids) // (EXPERTS // 4)) <= 2


def test_biases_and_mask(device):
    arrays = arrays_of()
    random = np.random.default_rng(1)
    for name, shape in {
        "b1": (EXPERTS, 2 * INTER),
        "b2": (EXPERTS, HIDDEN),
        "router_bias": (EXPERTS,),
    }.items():
        arrays[name] = jnp.asarray(random.standard_normal(shape), jnp.float32)
    mask = jnp.arange(TOKENS) % 3 == 0
    aux = check(arrays, {"padding_mask": mask})
    assert (np.asarray(aux.ids[::3]) == -1).all() and (np.asarray(aux.ids[1::3]) >= 0).all()


@pytest.mark.parametrize("gate", [False, True])
def test_shared_expert(device, gate):
    check(arrays_of(shared=16, gate=gate))


def test_latent_projections(device):
    check(arrays_of(latent=16, shared=16))


def test_bfloat16_with_float32_router(device):
    arrays = arrays_of("bfloat16", shared=16)
    check(arrays)
    check(arrays | {"router_weight": arrays["router_weight"].astype(jnp.float32)})


def by_logits(x, router_weight, **rest):
    """As ``moe``, with the router's product by JAX, which carries its gradients on."""
    logits = jnp.matmul(x, router_weight.T, precision=reference.HIGHEST)
    return moe_jax.moe(x, None, logits=logits, **rest)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_logits(device, score):
    """Ready logits stand in for the router's product, beside all else that a layer has."""
    arrays = arrays_of(shared=16, latent=16)
    arrays["router_bias"] = jnp.linspace(0, 0.5, EXPERTS, dtype=jnp.float32)
    mask = jnp.arange(TOKENS) % 3 == 0
    aux = check(arrays, {"padding_mask": mask}, by_logits, score=score, renormalize=True)
    assert (np.asarray(aux.ids[::3]) == -1).all() and (np.asarray(aux.ids[1::3]) >= 0).all()


def test_losses_of_logits(device):
    """Both losses reach the logits as they reach the router's weight."""
    arrays = arrays_of()

    def loss(arrays, run):
        _, aux = run(**arrays, topk=TOPK, **LOSSES["batch"])
        return 0.7 * aux.balance_loss - 1.5 * aux.z_loss, aux

    grad = jax.value_and_grad(loss, has_aux=True)
    (_, found), grads = grad(arrays, by_logits)
    (_, wanted), expected = grad(arrays, moe_jax.moe)
    assert_close(found.balance_loss, wanted.balance_loss, "float32")
    assert_close(found.z_loss, wanted.z_loss, "float32")
    for name in ("x", "router_weight"):
        assert np.asarray(grads[name]).any()
        assert_close(grads[name], expected[name], "float32", name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_half_types(device, dtype):
    """They are read as they are: the layer is that on the same numbers in float32."""
    arrays = arrays_of()
    logits = (arrays["x"] @ arrays.pop("router_weight").T).astype(dtype)

    def loss(logits):
        out, _ = moe_jax.moe(router_weight=None, logits=logits, **arrays, topk=TOPK)
        return (out**2).sum(), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(logits)
    wide, wanted = jax.grad(loss, has_aux=True)(logits.astype(jnp.float32))
    assert_same(out, wanted)
    assert grads.dtype == dtype and np.asarray(wide).any()
    assert_same(grads, wide.astype(dtype))


@pytest.mark.parametrize("run", [moe_jax.moe, by_logits])
def test_replayed_ids(device, run):
    """Ids of the caller's in place of the choice; their weights still come from the scores."""
    ids = np.random.default_rng(5).permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)
    ids = ids[:, :TOPK].astype(np.int16)
    ids[0, 1], ids[1] = -1, -5
    aux = check(arrays_of(), {"ids": ids}, run)
    assert_same(np.maximum(aux.ids, -1), np.maximum(ids, -1))


LOSSES = {
    "batch": {"balance": "batch", "balance_coeff": 0.3, "z_coeff": 0.02},
    "sequence": {"balance": "sequence", "balance_coeff": 0.3, "sequence_tokens": 16},
}


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("kind", LOSSES)
def test_losses(device, kind, score):
    """Values and gradients of the two losses, each with a factor of its own, against jnp."""
    arrays, options = arrays_of(), LOSSES[kind]
    mask = jnp.arange(TOKENS) % 5 == 0

    def loss(arrays):
        _, aux = moe_jax.moe(**arrays, topk=TOPK, padding_mask=mask, score=score, **options)
        return 0.7 * aux.balance_loss - 1.5 * aux.z_loss, aux

    def wanted(arrays, ids, mask):
        logits = jnp.matmul(arrays["x"], arrays["router_weight"].T, precision=reference.HIGHEST)
        length = options.get("sequence_tokens", TOKENS)
        balance = (
            reference.balance_loss(logits, ids, ~mask, score, length) * options["balance_coeff"]
        )
        z = reference.z_loss(logits, ~mask) * options.get("z_coeff", 0)
        return 0.7 * balance - 1.5 * z, jnp.stack([balance, z])

    (_, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    run = jax.value_and_grad(wanted, has_aux=True)
    (_, losses), expected = on_cpu(run, arrays, aux.ids, mask)
    assert_close(np.stack([aux.balance_loss, aux.z_loss]), losses, "float32", "losses")
    for name in ("x", "router_weight"):
        assert_close(grads[name], expected[name], "float32", f"d{name}")


def test_losses_follow_their_factor():
    """Unlike a gradient that is added in silence, half the loss has half the gradient."""
    arrays = arrays_of()

    def loss(router_weight, factor):
        _, aux = moe_jax.moe(
            **arrays | {"router_weight": router_weight}, topk=TOPK, **LOSSES["batch"]
        )
        return factor * (aux.balance_loss + aux.z_loss)

    whole, half, none = (jax.grad(loss)(arrays["router_weight"], f) for f in (1.0, 0.5, 0.0))
    assert np.asarray(whole).any() and not np.asarray(none).any()
    assert_close(2 * half, whole, "float32")


def test_capacity_drops(device):
    arrays = arrays_of()
    arrays["router_weight"] = arrays["router_weight"].at[0].set(arrays["x"].mean(0) * 5)
    full, aux = moe_jax.moe(**arrays, topk=TOPK)
    cut, dropped = moe_jax.moe(**arrays, topk=TOPK, capacity_factor=0.5, drop="position")
    assert_same(aux.counts, dropped.counts)
    assert np.asarray(aux.counts).max() > TOKENS * TOPK / EXPERTS / 2
    assert np.abs(np.asarray(full - cut)).max() > 0.01


@pytest.mark.parametrize("count", [-3, 0, 7, TOKENS, 2**31 - 1])
def test_token_count(device, count):
    """Tokens from the count on are as if masked, in values, counts, losses and gradients."""
    arrays = arrays_of()

    def loss(arrays, rest):
        out, aux = moe_jax.moe(**arrays, **rest, topk=TOPK, **LOSSES["batch"])
        return (out**2).sum() + aux.balance_loss + aux.z_loss, (out, aux)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    found = run(arrays, {"token_count": jnp.int32(count)})
    assert_same(found, run(arrays, {"padding_mask": jnp.arange(TOKENS) >= count}))

    ids, weights = jnp.tile(jnp.arange(TOPK), (TOKENS, 1)), jnp.ones((TOKENS, TOPK))
    given = {name: arrays[name] for name in ("x", "w1", "w2")}
    layer = jax.jit(lambda n: moe_jax.experts(ids=ids, weights=weights, token_count=n, **given))
    cut = jnp.where((jnp.arange(TOKENS) < count)[:, None], ids, -1)
    assert_same(layer(jnp.array([count])), moe_jax.experts(ids=cut, weights=weights, **given))


def as_int64(words):
    return np.ascontiguousarray(words).view(np.int64)[:, 0]


def test_global_counts(device):
    """Counts go in and come out, untouched where they came from; the rest is NumPy's layer."""
    router = {"balance": "global", "balance_coeff": 0.3, "z_coeff": 0.02}
    sizes = {"hidden": HIDDEN, "inter": INTER, "experts": EXPERTS, "topk": TOPK}
    plain = moeblas.numpy.Layer(**sizes, act="swiglu", router=router)
    wanted_counts = np.full(EXPERTS + 1, 2**32 - 20, np.int64)  # the low words run over
    counts = first = jnp.asarray(wanted_counts.view(np.int32).reshape(-1, 2))

    def loss(arrays, counts):
        out, aux = moe_jax.moe(**arrays, topk=TOPK, global_counts=counts, **router)
        return out.sum() + aux.balance_loss + aux.z_loss, (out, aux)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for seed in range(3):
        arrays = arrays_of(seed=seed)
        before = np.asarray(counts)
        (_, (out, aux)), grads = run(arrays, counts)
        assert_same(counts, before)
        host = {name: np.asarray(array) for name, array in arrays.items()}
        x = host.pop("x")
        result = plain.forward(x, host, global_counts=wanted_counts)
        expected = plain.backward(result, np.ones_like(x))
        assert_same(as_int64(aux.global_counts), wanted_counts)
        assert_close(out, result.out, "float32", "out")
        assert_close([aux.balance_loss, aux.z_loss], result.losses, "float32", "losses")
        assert_close(grads["x"], expected.x, "float32", "dx")
        for name, grad in expected.params.items():
            assert_close(grads[name], grad, "float32", f"d{name}")
        counts = aux.global_counts
    assert (as_int64(counts) > 2**32).all() and (as_int64(first) == 2**32 - 20).all()


def test_global_counts_in_a_loop(device):
    """Carried by scan, donated, and as int64, they are the same counts."""
    arrays = arrays_of()
    options = {"topk": TOPK, "balance": "global", "balance_coeff": 0.3}

    def step(counts, _=None):
        _, aux = moe_jax.moe(**arrays, **options, global_counts=counts)
        return aux.global_counts, aux.balance_loss

    zeros = jnp.zeros((EXPERTS + 1, 2), jnp.int32)
    counts, losses = zeros, []
    for _ in range(3):
        counts, value = step(counts)
        losses.append(value)
    assert_same(jax.jit(lambda c: jax.lax.scan(step, c, length=3))(zeros), (counts, losses))
    donating = jax.jit(step, donate_argnums=0)
    assert_same(donating(donating(donating(jnp.copy(zeros))[0])[0])[0], counts)
    assert as_int64(counts)[-1] == 3 * TOKENS
    with jax.enable_x64(True):
        long, value = step(jnp.asarray(2 * as_int64(counts) // 3))
        assert long.dtype == jnp.int64
        assert_same((long, value), (as_int64(counts), losses[-1]))


def test_sm_limit(device):
    """A limit changes no bit; one beyond what the device has is refused."""
    arrays = arrays_of()

    def grads(**options):
        run = lambda a: (moe_jax.moe(**a, topk=TOPK, **options)[0] ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(run))(arrays)

    assert_same(grads(sm_limit=1), grads())
    with pytest.raises(Exception, match="sm_limit = 100000, wanted"):
        jax.block_until_ready(grads(sm_limit=100000))


def test_no_tokens(device):
    arrays = arrays_of(shared=16) | {"x": jnp.zeros((0, HIDDEN))}

    def loss(arrays):
        out, aux = moe_jax.moe(**arrays, topk=TOPK, **LOSSES["batch"])
        return out.sum() + aux.balance_loss + aux.z_loss

    value, grads = jax.value_and_grad(loss)(arrays)
    assert value == 0
    assert not any(np.asarray(grad).any() for grad in grads.values())


def test_example(device, capsys):
    """examples/jax_layer.py learns, and is what the manual shows."""
    root = Path(__file__).resolve().parents[2]
    code = (root / "examples/jax_layer.py").read_text()
    assert code.split('"""\n\n', 1)[1] in (root / "docs/python_jax.md").read_text()
    exec(compile(code, "jax_layer.py", "exec"), {"__name__": "example"})
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0] / 5


REFUSALS = {
    'one of balance = "global" and global_counts': {"balance": "global", "balance_coeff": 0.1},
    'balance = "global" and global_counts is missing': {
        "global_counts": np.zeros((EXPERTS + 1, 2), np.int32)
    },
    "global_counts is int32[8, 2], wanted int32[9, 2]": {
        "balance": "global",
        "global_counts": np.zeros((EXPERTS, 2), np.int32),
    },
    "token_count is float32[], wanted one integer": {"token_count": 2.0},
    "token_count is int32[2], wanted one integer": {"token_count": np.zeros(2, np.int32)},
    "sm_limit = -1": {"sm_limit": -1},
    "router.balance_coeff = 0.1, wanted 0": {"balance_coeff": 0.1},
    "router.sequence_tokens = 0, wanted > 0": {"balance": "sequence", "balance_coeff": 0.1},
    "one of shared_w1 and shared_w2 is None": {"shared_w1": np.zeros((8, HIDDEN), np.float32)},
    "one of latent_down and latent_up is None": {"latent_up": np.zeros((HIDDEN, 8), np.float32)},
    "router_weight is float16[8, 32], wanted float32[8, 32]": {
        "router_weight": np.zeros((EXPERTS, HIDDEN), np.float16)
    },
    "topk = 9, wanted at most the 8 experts": {"topk": 9},
    "router_weight and logits are both None, wanted one": {"router_weight": None},
    "router_weight and logits are both given, wanted one": {
        "logits": np.zeros((TOKENS, EXPERTS), np.float32)
    },
    "logits is of int32, wanted float32, bfloat16 or float16": {
        "router_weight": None,
        "logits": np.zeros((TOKENS, EXPERTS), np.int32),
    },
    "logits is float32[40, 7], wanted float32[40, 8]": {
        "router_weight": None,
        "logits": np.zeros((TOKENS, EXPERTS - 1), np.float32),
    },
    "ids is int32[40, 2], wanted int32[40, 3]": {"ids": np.zeros((TOKENS, 2), np.int32)},
    "option tokens is unknown": {"tokens": 3},
    'router.score = "max", wanted one of softmax': {"score": "max"},
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refusals(sentence):
    with pytest.raises(moeblas.Error) as caught:
        jax.block_until_ready(moe_jax.moe(**{**arrays_of(), "topk": TOPK, **REFUSALS[sentence]}))
    assert sentence in str(caught.value)
