# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.moeblas.*: opcheck, memory, out variants, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import moeblas
import moeblas.torch as mt
import torch_layer as plain
from moeblas.torch._layer import GRADS, PARAMS, ROUTING
from moeblas.torch.functional import options_text
from torch.library import opcheck

TOKENS, HIDDEN, INTER, COUNT, TOPK = 12, 16, 24, 4, 2
FORWARD, BACKWARD = torch.ops.moeblas.forward, torch.ops.moeblas.backward
# Which inputs an op has beside x, w1 and w2, and its options.
CASES = {
    "ids": (("ids", "weights"), {}),
    "ids-bias": (("ids", "weights", "b1", "b2", "padding_mask"), {"recompute": True}),
    "rows": (("row_offset", "weights"), {"act": "relu2"}),
    "hidden": (("router_weight",), {"topk": TOPK, "renormalize": True}),
    "logits": (("logits", "router_bias", "token_count"), {"topk": TOPK, "score": "sigmoid"}),
    "all": (
        ("router_weight", "router_bias", "correction_bias", "b1", "b2", "global_counts")
        + ("shared_w1", "shared_w2", "shared_gate", "latent_down", "latent_up"),
        {"topk": TOPK, "balance": "global", "balance_coeff": 0.1, "z_coeff": 0.1},
    ),
}
SHAPES = {
    "logits": (TOKENS, COUNT),
    "ids": (TOKENS, TOPK),
    "weights": (TOKENS, TOPK),
    "row_offset": (COUNT + 1,),
    "padding_mask": (TOKENS,),
    "token_count": (1,),
    "global_counts": (COUNT + 1,),
    "router_weight": (COUNT, HIDDEN),
    "router_bias": (COUNT,),
    "correction_bias": (COUNT,),
    "w1": (COUNT, 2 * INTER, HIDDEN),
    "b1": (COUNT, 2 * INTER),
    "w2": (COUNT, HIDDEN, INTER),
    "b2": (COUNT, HIDDEN),
    "shared_w1": (2 * INTER, HIDDEN),
    "shared_w2": (HIDDEN, INTER),
    "shared_gate": (HIDDEN,),
    "latent_down": (8, HIDDEN),
    "latent_up": (HIDDEN, 8),
}


def entry_of(names):
    for name, entry in (("ids", "ids"), ("row_offset", "rows"), ("logits", "logits")):
        if name in names:
            return entry
    return "hidden"


def make(name, shape, device):
    """One input with values that make sense."""
    if name == "ids":
        return torch.randint(-1, COUNT + 1, shape, dtype=torch.int32, device=device)
    if name == "row_offset":
        return torch.tensor([0, 3, 3, 8, 10], dtype=torch.int32, device=device)
    if name == "padding_mask":
        return torch.arange(TOKENS, device=device) % 5 == 2
    if name == "token_count":
        return torch.tensor([TOKENS - 3], dtype=torch.int32, device=device)
    if name == "global_counts":
        return torch.arange(COUNT + 1, device=device)
    return torch.randn(shape, device=device) / 4


def inputs(case, device, grad=True):
    """x, every input in the op's order (None where the case has none), and the options' text."""
    torch.manual_seed(3)
    names, options = CASES[case]
    names = (*names, "w1", "w2")
    shapes = dict(SHAPES)
    if "latent_down" in names:
        shapes |= {"w1": (COUNT, 2 * INTER, 8), "w2": (COUNT, 8, INTER), "b2": (COUNT, 8)}
    if "row_offset" in names:
        shapes |= {"weights": (TOKENS,), "w1": (COUNT, INTER, HIDDEN)}
    x = torch.randn(TOKENS, HIDDEN, device=device)
    made = [make(n, shapes[n], device) if n in names else None for n in ROUTING + PARAMS]
    for name, tensor in zip(("x", *ROUTING, *PARAMS), (x, *made)):
        if grad and tensor is not None and tensor.is_floating_point() and name != "correction_bias":
            tensor.requires_grad_()
    return x, made, options_text(entry_of(names), **options)


def backward_inputs(case, device):
    """What op backward takes, up to the options, for a forward call that has run."""
    x, made, text = inputs(case, device, grad=False)
    outputs = FORWARD.default(x, *made, text, True)
    by_name = dict(zip(ROUTING + PARAMS, made))
    kept = [by_name[n] for n in ROUTING + PARAMS if n not in ("ids", "global_counts")]
    dlosses = (
        torch.tensor([2.0, 3.0], device=device) if entry_of(CASES[case][0]) == "hidden" else None
    )
    return (torch.randn_like(x), dlosses, x, *kept, outputs[-1], text), {"x": x, **by_name}


def wanted_of(by_name):
    return [
        by_name[name] is not None and not (name == "weights" and by_name["weights"] is None)
        for name in GRADS
    ]


@pytest.fixture
def filled_memory():
    """Makes torch fill fresh memory, so that the unused bytes of `saved` are comparable."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_opcheck_forward(case, device, filled_memory):
    x, made, text = inputs(case, device)
    opcheck(FORWARD.default, (x, *made, text, False))


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(case, device, filled_memory):
    given, by_name = backward_inputs(case, device)
    opcheck(BACKWARD.default, (*given, wanted_of(by_name)))


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("case", ["ids", "all"])
def test_opcheck_out(case, device):
    x, made, text = inputs(case, device, grad=False)
    outputs = {"out": torch.empty_like(x)}
    if case == "all":
        outputs["counts"] = torch.empty(COUNT, dtype=torch.int32, device=device)
        outputs["topk_weights"] = torch.empty(TOKENS, TOPK, device=device)
    opcheck(FORWARD.out, (x, *made, text), outputs)
    given, by_name = backward_inputs(case, device)
    grads = {"dx": torch.empty_like(x), "dw1": torch.empty_like(by_name["w1"])}
    opcheck(BACKWARD.out, (*given, False), grads)


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_out_variants_give_the_same_bits(case, device):
    x, made, text = inputs(case, device, grad=False)
    wanted = FORWARD.default(x, *made, text, False)
    out = torch.full_like(x, torch.nan)
    before = made[ROUTING.index("global_counts")]
    after = before if before is None else before.clone()
    made[ROUTING.index("global_counts")] = after
    names = ("losses", "topk_ids", "topk_weights", "counts")
    reports = {n: torch.empty_like(t) for n, t in zip(names, wanted[1:5])}
    FORWARD.out(x, *made, text, out=out, **{n: reports.get(n) for n in names})
    assert torch.equal(out, wanted[0])
    assert all(torch.equal(reports[n], t) for n, t in zip(names, wanted[1:5]))
    assert after is None or (torch.equal(after, wanted[5]) and not torch.equal(before, after))

    given, by_name = backward_inputs(case, device)
    flags = wanted_of(by_name)
    found = dict(zip([n for n, flag in zip(GRADS, flags) if flag], BACKWARD.default(*given, flags)))
    outs = {n: torch.full_like(t, torch.nan) for n, t in found.items()}
    BACKWARD.out(*given, False, **{"d" + n: outs.get(n) for n in GRADS})
    for name, tensor in outs.items():
        assert torch.equal(tensor, found[name]), name
    BACKWARD.out(*given, True, **{"d" + n: outs.get(n) for n in GRADS})
    for name, tensor in outs.items():
        twice = 2 if name in PARAMS else 1
        plain.assert_close(tensor, twice * found[name], 1e-6, name)


@pytest.mark.parametrize("device", plain.DEVICES)
def test_main_grads(device):
    """Gradients of bf16 weights may be gathered in fp32."""
    given, by_name = backward_inputs("ids", device)
    short = [t.bfloat16() if t is not None and t.shape == s.shape and t.is_floating_point() else t
             for t, s in zip(given[:-2], given[:-2])]  # fmt: skip
    by_place = dict(zip(("dout", "dlosses", "x"), short))
    kept = [n for n in ROUTING + PARAMS if n not in ("ids", "global_counts")]
    tensors = dict(zip(kept, short[3:]))
    ids = by_name["ids"]
    tensors["weights"] = by_name["weights"]
    everything = [ids if n == "ids" else tensors.get(n) for n in ROUTING + PARAMS]
    saved = FORWARD.default(by_place["x"], *everything, given[-1], True)[-1]
    kept_tensors = [tensors[n] for n in kept]
    arguments = (by_place["dout"], None, by_place["x"], *kept_tensors, saved, given[-1])
    main = torch.ones_like(by_name["w1"])
    BACKWARD.out(*arguments, True, **{"d" + n: main if n == "w1" else None for n in GRADS})
    rounded = BACKWARD.default(*arguments, [n == "w1" for n in GRADS])[0]
    assert main.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    plain.assert_close(main - 1, rounded, 2**-8)
    assert not torch.equal((main - 1).bfloat16().float(), main - 1)
    mixed = {"dw1": main, "dw2": torch.empty_like(tensors["w2"])}
    with pytest.raises(moeblas.ArgumentError, match="wanted all float32 or all as x"):
        BACKWARD.out(*arguments, False, **{"d" + n: mixed.get("d" + n) for n in GRADS})


@pytest.mark.parametrize("device", plain.DEVICES)
def test_any_strides_and_addresses(device):
    """Strided and misaligned inputs are read rightly; nothing given is written to or returned."""
    x, made, text = inputs("ids-bias", device, grad=False)
    wanted = FORWARD.default(x, *made, text, False)[0]
    odd = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    assert odd.data_ptr() % 16 != 0
    turned = [t if t is None else t.mT.contiguous().mT if t.dim() > 1 else t for t in made]
    copies = [None if t is None else t.clone() for t in made]
    outputs = FORWARD.default(odd, *turned, text, True)
    assert torch.equal(outputs[0], wanted) and torch.equal(odd, x)
    memory = {t.untyped_storage().data_ptr() for t in (odd, *turned) if t is not None}
    memory_out = [t.untyped_storage().data_ptr() for t in outputs]
    assert len(set(memory_out)) == len(outputs) and not memory & set(memory_out)
    assert all(a is None or torch.equal(a, b) for a, b in zip(turned, copies))


@pytest.mark.parametrize("device", plain.DEVICES)
def test_no_tokens(device):
    x = torch.empty(0, HIDDEN, device=device, requires_grad=True)
    w1 = torch.randn(COUNT, 2 * INTER, HIDDEN, device=device, requires_grad=True)
    w2 = torch.randn(COUNT, HIDDEN, INTER, device=device, requires_grad=True)
    router = torch.randn(COUNT, HIDDEN, device=device)
    ids = torch.empty(0, TOPK, dtype=torch.int64, device=device)
    out = mt.experts(x, ids, torch.empty(0, TOPK, device=device), w1, w2)
    more, routing = mt.moe(x, router, w1, w2, topk=TOPK, balance="batch", balance_coeff=1.0)
    (out.sum() + more.sum() + routing.balance_loss).backward()
    assert out.shape == more.shape == x.grad.shape == (0, HIDDEN)
    assert (w1.grad == 0).all() and (w2.grad == 0).all() and (routing.counts == 0).all()


def test_saved_is_enough():
    """The line that sizes the buffer for backward lies above what the plan asks for, not far."""
    for topk in (1, 3):
        for options in ({}, {"recompute": True}, {"balance": "sequence", "sequence_tokens": 7}):
            text = options_text("hidden", topk=topk, **options)
            x = torch.randn(1, HIDDEN)
            tensors = [None] * (len(ROUTING) + len(PARAMS))
            names = ROUTING + PARAMS
            for name in ("router_weight", "w1", "w2", "shared_w1", "shared_w2"):
                tensors[names.index(name)] = torch.empty(SHAPES[name])
            layer = torch_ops_layer(x, text, tensors)
            for tokens in (0, 1, 2, 7, 63, 64, 65, 1000, 4097, 100003):
                least = layer.plan.saved(tokens)
                assert least <= layer.saved_bytes(tokens)
                assert layer.saved_bytes(tokens) <= 1.02 * least + 16384 + tokens


def torch_ops_layer(x, text, tensors):
    from moeblas.torch import ops

    return ops._forward_call(x, tensors, text).layer


REFUSED = {
    "w1 is torch.bfloat16, wanted torch.float32": {"w1": torch.bfloat16},
    "x is torch.float64, wanted float32": {"x": torch.float64},
    r"w2 has shape \[4, 16, 23\]|w1 has shape \[4, 48, 16\], wanted \[4, 46, 16\]": {
        "w2": (4, 16, 23)
    },
    r"w2 has shape \[5, 16, 24\], wanted \[4, 16, 24\]": {"w2": (5, 16, 24)},
    r"b1 has shape \[4, 24\], wanted \[4, 48\]": {"b1": (4, 24)},
    r"w1 has shape \[48, 16\], wanted 3 dimensions": {"w1": (48, 16)},
    r"ids has shape \[11, 2\], wanted 12 rows as x": {"ids": (11, 2)},
    r"weights has shape|ids has shape \[3\], wanted \[2\]": {"ids": (12, 3)},
    "x has 3 dimensions, wanted 2": {"x": (3, 4, 16)},
}


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.parametrize("traced", [False, True])
def test_refusals(sentence, traced):
    """What does not fit together is refused with a sentence, when run and when traced."""
    made = {"x": torch.randn(12, 16), "b1": torch.randn(4, 48)}
    made |= {name: torch.randn(SHAPES[name]) for name in ("w1", "w2", "weights")}
    made["ids"] = torch.zeros(12, 2, dtype=torch.int32)
    for name, change in REFUSED[sentence].items():
        shaped = isinstance(change, tuple)
        made[name] = made[name].new_zeros(change) if shaped else made[name].to(change)
    tensors = [made.get(name) for name in ROUTING + PARAMS]
    if traced and "rows" in sentence:
        pytest.skip("the number of tokens is symbolic while tracing: refused when run")
    mode = torch._subclasses.FakeTensorMode()
    if traced:
        made["x"] = mode.from_tensor(made["x"])
        tensors = [t if t is None else mode.from_tensor(t) for t in tensors]
    with pytest.raises(moeblas.Error, match=sentence):
        FORWARD.default(made["x"], *tensors, options_text("ids"), False)


def test_unknown_options_and_double_backward():
    x, ids = torch.randn(3, 16, requires_grad=True), torch.zeros(3, 1, dtype=torch.int64)
    w1, w2 = torch.randn(4, 48, 16), torch.randn(4, 16, 24)
    with pytest.raises(TypeError, match="unknown options \\['gate_maximum'\\]"):
        mt.experts(x, ids, torch.ones(3, 1), w1, w2, gate_maximum=7.0)
    with pytest.raises(moeblas.ArgumentError, match='activation|act.kind|"swish"'):
        mt.experts(x, ids, torch.ones(3, 1), w1, w2, act="swish")
    out = mt.experts(x, ids, torch.ones(3, 1), w1, w2)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("recorded", [False, True])
def test_forward_mode_and_transforms_are_refused(recorded):
    """A tangent is never lost silently, and no transform runs the layer wrongly."""
    x, made, text = inputs("ids", "cpu", grad=recorded)
    run = lambda x: FORWARD.default(x, *made, text, False)[0]  # noqa: E731
    w1 = made[(ROUTING + PARAMS).index("w1")]
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(run(x), run(x.detach().clone()))
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(moeblas.UnsupportedError, match="x has a forward-mode tangent"):
            run(dual)
        dual = torch.autograd.forward_ad.make_dual(w1, torch.ones_like(w1))
        with pytest.raises(moeblas.UnsupportedError, match="w1 has a forward-mode tangent"):
            mt.experts(x, made[1], made[2], dual, made[(ROUTING + PARAMS).index("w2")])
    with pytest.raises(moeblas.UnsupportedError, match="x has a forward-mode tangent"):
        torch.func.jvp(run, (x.detach(),), (torch.ones_like(x),))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: run(x).sum())(x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for moeblas::forward"):
        torch.func.vmap(run)(x[None].expand(2, -1, -1))


@pytest.mark.parametrize("device", plain.DEVICES)
def test_token_count(device):
    """Tokens from the count on are as if they were not there, forward and backward."""
    x, made, _ = inputs("hidden", device)
    by_name = {n: t for n, t in zip(ROUTING + PARAMS, made) if t is not None}
    leaves = (x, *by_name.values())
    options = {"topk": TOPK, "balance": "batch", "balance_coeff": 1.0}
    count = torch.tensor([7], dtype=torch.int32, device=device)
    results = []
    for tokens, given in ((x, {"token_count": count}), (x[:7], {})):
        out, routing = mt.moe(tokens, **by_name, **given, **options)
        loss = out.square().sum() + routing.balance_loss
        results.append((out, routing.counts, *torch.autograd.grad(loss, leaves)))
    assert (results[0][0][7:] == 0).all() and (results[0][2][7:] == 0).all()
    assert torch.equal(results[0][0][:7], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for found, wanted in zip(results[0][2:], results[1][2:]):
        plain.assert_close(found, wanted, 2e-6)


def test_threads():
    """Many threads share a layer; the number of threads inside changes no bit."""
    x, made, text = inputs("all", "cpu")
    leaves = [t for t in (x, *made) if t is not None and t.requires_grad]

    def run(_):
        outputs = FORWARD.default(x, *made, text, False)
        return outputs[:5], torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaves)

    before = torch.get_num_threads()
    wanted = run(0)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(32)))
    torch.set_num_threads(1)
    found.append(run(0))
    torch.set_num_threads(before)
    for outputs, grads in found:
        assert all(map(torch.equal, outputs, wanted[0])) and all(map(torch.equal, grads, wanted[1]))


@plain.needs_cuda
def test_current_stream_is_used():
    """Work on a side stream waits for what that stream did before, and for nothing else."""
    x, made, text = inputs("ids", "cuda", grad=False)
    wanted = FORWARD.default(x, *made, text, False)[0]
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        FORWARD.default(late, *made, text, False)  # so that the stream has memory of its own
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        out = FORWARD.default(late, *made, text, False)[0]
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_current_device_stays():
    x, made, text = inputs("ids", "cuda:1", grad=False)
    FORWARD.default(x, *made, text, False)
    assert torch.cuda.current_device() == 0
