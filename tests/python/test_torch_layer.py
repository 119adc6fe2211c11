# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of moeblas.torch against the same layer in fp64 (torch_layer.py).

torch.autograd.gradcheck wants fp64, which the kernels do not have: its place is taken by the
comparison with fp64 autograd, and by central differences of the fp32 layer itself along random
directions.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import moeblas.torch as mt
import torch_layer as plain

GPT_OSS = {
    "alpha": 1.702,
    "gate_max": 1.5,
    "up_min": -1.5,
    "up_max": 1.5,
    "up_offset": 1.0,
    "layout": "interleaved",
}
EXPERTS = {
    "swiglu": {},
    "up-first": {"act": "geglu", "layout": "concat_up_first"},
    "gpt-oss": {**GPT_OSS, "bias": True, "transposed": True},
    "interleave-8": {"layout": "interleaved", "interleave": 8, "bias": True},
    "plain": {"act": "relu2", "bias": True},
    "tanh": {"act": "geglu_tanh"},
    "llama-4": {"weight_on_input": True},
    "recompute": {"recompute": True, "bias": True},
}
ROUTERS = {
    "mixtral": {"renormalize": True},
    "olmoe": {"balance": "batch", "balance_coeff": 0.01, "z_coeff": 0.001},
    "gpt-oss": {**GPT_OSS, "score": "topk_softmax", "router_bias": True, "bias": True},
    "deepseek-v3": {
        "score": "sigmoid",
        "renormalize": True,
        "scale": 2.5,
        "groups": 4,
        "topk_groups": 2,
        "group_score": "top2_sum",
        "correction_bias": True,
        "shared_inter": 24,
        "balance": "sequence",
        "balance_coeff": 0.1,
        "sequence_tokens": 10,
    },
    "qwen3-next": {"renormalize": True, "shared_inter": 16, "shared_gate": True},
    "latent": {"score": "sqrt_softplus", "latent": 24, "shared_inter": 16, "transposed": True},
    "global": {"balance": "global", "balance_coeff": 0.5, "z_coeff": 0.01, "act": "gelu"},
}
TENSORS = ("bias", "router_bias", "correction_bias", "shared_inter", "shared_gate", "latent")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS, HIDDEN, INTER, COUNT, TOPK = 37, 48, 32, 8, 3


def split(case):
    """The options of the layer, and which parts it has."""
    options = {name: value for name, value in case.items() if name not in TENSORS}
    return options, {name: value for name, value in case.items() if name in TENSORS}


def draw(*shape, dtype=torch.float32, device="cpu", scale=1.0):
    """Random numbers that are the same for every device."""
    made = torch.randn(*shape, generator=draw.generator) * scale
    return made.to(device=device, dtype=dtype)


def make_inputs(case, dtype, device, routed):
    """Parameters by name and the input x, as leaves."""
    draw.generator = torch.Generator().manual_seed(17)
    options, parts = split(case)
    if dtype != torch.float32 and "gate_max" in options:
        # Rounding moves values across the step in the slope of a clamp: put it where there are next
        # to none.
        options |= {"gate_max": 7.0, "up_min": -7.0, "up_max": 7.0}
    module = mt.MoE(HIDDEN, INTER, COUNT, TOPK, **parts, **options)
    made = {}
    for name, tensor in module._tensors().items():
        kind = torch.float32 if name in ("router_bias", "correction_bias") else dtype
        if name != "global_counts" and (routed or not name.startswith("router")):
            made[name] = draw(*tensor.shape, dtype=kind, device=device, scale=0.25)
    made["x"] = draw(TOKENS, HIDDEN, dtype=dtype, device=device)
    for name, tensor in made.items():
        tensor.requires_grad_(name != "correction_bias")
    return options, made


def as_double(made):
    """The same leaves in fp64."""
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad)
        for name, tensor in made.items()
    }


def compare_gradients(found, wanted, limit):
    """Gradients of all leaves that have one."""
    for name, tensor in found.items():
        if tensor.requires_grad:
            assert tensor.grad is not None, name
            plain.assert_close(tensor.grad, wanted[name].grad, limit, "d" + name)


def given_routing(device, dtype=torch.int64):
    """Ids with some outside 0 .. E-1 and a repeated one, and weights that want a gradient."""
    draw.generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, COUNT + 1, (TOKENS, TOPK), generator=draw.generator)
    ids[3] = 2
    ids[4] = COUNT + 7
    weights = torch.rand(TOKENS, TOPK, generator=draw.generator)
    return ids.to(device, dtype), weights.to(device).requires_grad_()


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name, dtype, device):
    options, made = make_inputs(EXPERTS[name], dtype, device, routed=False)
    ids, weights = given_routing(device)
    made["weights"] = weights
    wanted = as_double(made)
    dout = draw(TOKENS, HIDDEN, dtype=dtype, device=device)
    p = {key: made[key] for key in made if key not in ("x", "weights")}
    out = mt.experts(made["x"], ids, weights, **p, **options)
    out.backward(dout)
    reference = plain.experts(wanted["x"], ids, wanted["weights"], wanted, options)
    reference.backward(dout.double())
    assert out.dtype == dtype
    plain.assert_close(out, reference, plain.FORWARD[dtype], "out")
    compare_gradients(made, wanted, plain.BACKWARD[dtype])
    outside = (ids < 0) | (ids >= COUNT)
    assert (weights.grad[outside] == 0).all()
    assert (out[4] == 0).all() and (made["x"].grad[4] == 0).all()


def run_moe(name, dtype, device):
    """A layer with its router: (found leaves, wanted leaves, routing, reference) after backward."""
    options, made = make_inputs(ROUTERS[name], dtype, device, routed=True)
    wanted = as_double(made)
    mask = torch.arange(TOKENS, device=device) % 9 == 4
    before = torch.arange(COUNT + 1, device=device) + 30 if name == "global" else None
    p = {key: made[key] for key in made if key not in ("x", "router_weight")}
    extra = {"padding_mask": mask, "global_counts": before, "topk": TOPK}
    out, routing = mt.moe(made["x"], made["router_weight"], **p, **extra, **options)
    dout = draw(TOKENS, HIDDEN, dtype=dtype, device=device)
    (out.double() @ dout.double().T).trace().add(
        3 * routing.balance_loss.double() + 7 * routing.z_loss.double()
    ).backward()
    reference = plain.moe(wanted["x"], wanted, TOPK, options, mask, before, routing.ids)
    (reference[0] * dout.double()).sum().add(3 * reference[3] + 7 * reference[4]).backward()
    return options, made, wanted, out, routing, reference, mask, before


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("name", ROUTERS)
def test_moe(name, device):
    options, made, wanted, out, routing, reference, mask, before = run_moe(
        name, torch.float32, device
    )
    _, _, weights, balance, zloss = reference
    correction = wanted.get("correction_bias", 0)
    z = wanted["x"] @ wanted["router_weight"].T + wanted.get("router_bias", 0)
    chosen = plain.choose(z.detach(), TOPK, options, correction)
    chosen = torch.where(mask[:, None], -1, chosen)
    assert torch.equal(routing.ids.long(), chosen)
    plain.assert_close(out, reference[0], plain.FORWARD[torch.float32], "out")
    plain.assert_close(routing.weights[~mask], weights[~mask], 1e-5, "weights")
    torch.testing.assert_close(routing.balance_loss.double(), balance.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(routing.z_loss.double(), zloss.detach(), rtol=1e-5, atol=0)
    compare_gradients(made, wanted, plain.BACKWARD[torch.float32])
    counts = torch.bincount(chosen[~mask].flatten(), minlength=COUNT)
    assert torch.equal(routing.counts.long(), counts)
    if before is not None:
        total = torch.cat([counts, (~mask).sum()[None]])
        assert torch.equal(routing.global_counts, before + total)


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-next"])
def test_moe_in_short_types(name, dtype, device):
    """Without the parameters of the router, whose gradients are differences of what is rounded."""
    _, made, wanted, out, _, reference, _, _ = run_moe(name, dtype, device)
    plain.assert_close(out, reference[0], plain.FORWARD[dtype], "out")
    for key in [key for key in made if key.startswith("router")]:
        assert torch.isfinite(made.pop(key).grad).all()
    compare_gradients(made, wanted, plain.BACKWARD[dtype])


@pytest.mark.parametrize("device", plain.DEVICES)
def test_logits_entry(device):
    """Ready logits give what the router product gives, and get their gradient."""
    options, made = make_inputs(ROUTERS["mixtral"], torch.float32, device, routed=True)
    x, weight, w1, w2 = (made[name] for name in ("x", "router_weight", "w1", "w2"))
    whole, _ = mt.moe(x, weight, w1, w2, topk=TOPK, **options)
    wanted = torch.autograd.grad(whole.sum(), (x, weight, w1, w2))
    logits = (x.double() @ weight.double().T).float()
    out, _ = mt.moe(x, None, w1, w2, topk=TOPK, logits=logits, **options)
    plain.assert_close(out, whole, 1e-5)
    for found, like in zip(torch.autograd.grad(out.sum(), (x, weight, w1, w2)), wanted):
        plain.assert_close(found, like, 2e-5)


@pytest.mark.parametrize("device", plain.DEVICES)
def test_rows_entry(device):
    """Rows sorted by hand give what ids give; rows beyond the last expert's are zero."""
    _, made = make_inputs({}, torch.float32, device, routed=False)
    x, w1, w2 = made["x"], made["w1"], made["w2"]
    ids, weights = given_routing(device)
    ids, weights = ids[:, :1].clamp(-1, COUNT), weights.detach()[:, :1]
    key = torch.where(ids < 0, COUNT, ids).flatten()
    order = key.argsort(stable=True)
    offset = torch.cat(
        [key.new_zeros(1), torch.bincount(key, minlength=COUNT + 1)[:COUNT].cumsum(0)]
    )
    sorted_weights = weights.flatten()[order].requires_grad_()
    found = mt.rows(x[order], offset, w1, w2, weights=sorted_weights)
    wanted = mt.experts(x, ids, weights.requires_grad_(), w1, w2)[order]
    assert torch.equal(found, wanted)
    assert (found[offset[-1] :] == 0).all() and len(found) > offset[-1]
    got = torch.autograd.grad(found.square().sum(), (x, w1, w2, sorted_weights))
    like = torch.autograd.grad(wanted.square().sum(), (x, w1, w2, weights))
    for a, b in zip(got[:3], like[:3]):
        assert torch.equal(a, b)
    assert torch.equal(got[3], like[3].flatten()[order])


@pytest.mark.parametrize("name", ["swiglu", "gpt-oss", "llama-4"])
def test_differences(name):
    """The slope of the fp32 layer along a direction, by central differences of the layer itself."""
    case = dict(EXPERTS[name])
    for clamp in ("gate_max", "up_min", "up_max"):  # a difference across a step is no slope
        case.pop(clamp, None)
    options, made = make_inputs(case, torch.float32, "cpu", routed=False)
    ids, made["weights"] = given_routing("cpu")
    dout = draw(TOKENS, HIDDEN).double()

    def loss(moved):
        p = {key: moved[key] for key in moved if key not in ("x", "weights")}
        return (mt.experts(moved["x"], ids, moved["weights"], **p, **options).double() * dout).sum()

    loss(made).backward()
    for key, tensor in made.items():
        # Error: rounding 1e-7 |loss| / step against step^2 of the third derivative.
        direction = torch.nn.functional.normalize(draw(*tensor.shape).flatten(), dim=0).view_as(
            tensor
        )
        slope = (tensor.grad.double() * direction).sum()
        ends = [loss({**made, key: tensor + sign * 0.02 * direction}).item() for sign in (1, -1)]
        floor = 1e-2 * tensor.grad.norm() / tensor.numel() ** 0.5
        assert abs((ends[0] - ends[1]) / 0.04 - slope) < 1e-2 * abs(slope) + floor, key


@pytest.mark.parametrize("device", plain.DEVICES)
def test_capacity(device):
    """Experts over capacity keep their first slots; the rest counts for nothing."""
    options, made = make_inputs({}, torch.float32, device, routed=True)
    x, router, w1, w2 = (made[name] for name in ("x", "router_weight", "w1", "w2"))
    limits = {"capacity_factor": 0.5, "drop": "position"}
    out, routing = mt.moe(x, router, w1, w2, topk=TOPK, **limits)
    limit = -(-TOKENS * TOPK * 1 // (2 * COUNT))
    ids = routing.ids.long()
    one = torch.nn.functional.one_hot(ids, COUNT).flatten(0, 1)
    place = (one.cumsum(0) * one).sum(-1).view_as(ids)
    assert (place > limit).any()
    kept = torch.where(place <= limit, ids, -1)
    wanted = plain.experts(x.double(), kept, routing.weights.double(), as_double(made), options)
    plain.assert_close(out, wanted, 1e-5)
