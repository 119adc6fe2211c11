# SPDX-License-Identifier: Apache-2.0
"""moeblas.numpy against the plain NumPy layer of reference.py: values, every gradient, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from moeblas import ArgumentError, UnsupportedError
from moeblas.numpy import Layer, from_bf16, to_bf16

TOKENS = 7
BASE = {
    "hidden": 8,
    "inter": 6,
    "experts": 4,
    "topk": 2,
    "act": {"kind": "silu", "gated": True},
}
ROUTED = ("router_weight", "w1", "w2")
CLAMPED = {
    "alpha": 1.702,
    "gate_max": 0.7,
    "up_min": -0.7,
    "up_max": 0.7,
    "up_offset": 1,
}

CASES = {  # name -> (config beyond BASE, parameters)
    "softmax": ({}, ROUTED),
    "softmax renormalized": ({"router": {"renormalize": True, "scale": 2.5}}, ROUTED),
    "top-k softmax, biases": (
        {"router": {"score": "topk_softmax"}},
        (*ROUTED, "router_bias", "b1", "b2"),
    ),
    "sigmoid, correction": (
        {"router": {"score": "sigmoid", "renormalize": True}},
        (*ROUTED, "correction_bias"),
    ),
    "sqrt softplus": ({"router": {"score": "sqrt_softplus"}}, ROUTED),
    "groups": (
        {
            "experts": 8,
            "router": {
                "score": "sigmoid",
                "groups": 4,
                "topk_groups": 2,
                "group_score": "top2_sum",
            },
        },
        (*ROUTED, "correction_bias"),
    ),
    "losses": (
        {"router": {"balance": "batch", "balance_coeff": 0.3, "z_coeff": 0.2}},
        ROUTED,
    ),
    "not gated": ({"act": {"kind": "relu2"}}, (*ROUTED, "b1")),
    "gpt-oss": (
        {
            "router": {"score": "topk_softmax"},
            "act": {**BASE["act"], **CLAMPED, "layout": "interleaved"},
        },
        (*ROUTED, "router_bias", "b1", "b2"),
    ),
    "up first": ({"act": {**BASE["act"], "layout": "concat_up_first"}}, ROUTED),
    "pairs of rows": (
        {"act": {**BASE["act"], "layout": "interleaved", "interleave": 2}},
        ROUTED,
    ),
    "transposed, shared": (
        {"transposed": True, "shared_inter": 5},
        (*ROUTED, "shared_w1", "shared_w2", "shared_gate"),
    ),
    "latent": ({"latent": 3}, (*ROUTED, "latent_down", "latent_up")),
    "weight on input": (
        {"weight_on_input": True, "router": {"score": "sigmoid"}},
        ROUTED,
    ),
    "logits": ({"entry": "logits"}, ("w1", "w2")),
    "ids": (
        {"entry": "ids", "act": {"kind": "gelu_tanh", "gated": True}},
        ("w1", "b1", "w2"),
    ),
    "recompute": ({"recompute": "h"}, ROUTED),
}
# Relative error of an array: rounding h, a and out once each, and the fp32 sums.
BOUND = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}


def storage(dtype: str):
    """Functions to the array type of a format, and back to fp64."""
    if dtype == "bf16":
        return to_bf16, lambda a: from_bf16(a).astype(np.float64)
    plain = {"fp32": np.float32, "fp16": np.float16}[dtype]
    return lambda a: np.asarray(a, plain), lambda a: a.astype(np.float64)


class Case:
    """A layer, its arrays in its own format, and the same numbers in fp64."""

    def __init__(self, name: str, dtype: str, masked: bool = False) -> None:
        extra, names = CASES[name]
        self.config = {**BASE, **extra}
        self.layer = Layer(dtype=dtype, **self.config)
        self.rng = np.random.default_rng(len(name))
        encode, self.decode = storage(dtype)
        self.params, self.exact = {}, {}
        for key in names:
            scale = 0.5 if key.endswith("bias") or key in ("b1", "b2") else 0.6
            value = scale * self.rng.standard_normal(self.layer.shapes[key])
            fp32 = key in ("router_bias", "correction_bias")
            self.params[key] = value.astype(np.float32) if fp32 else encode(value)
            self.exact[key] = (self.params[key] if fp32 else self.decode(self.params[key])) * 1.0
            self.exact[key] = self.exact[key].astype(np.float64)
        self.x = encode(self.rng.standard_normal((TOKENS, 8)))
        self.dout = encode(self.rng.standard_normal((TOKENS, 8)))
        self.arrays = self.other_inputs(masked)
        self.inputs = {"x": self.decode(self.x)} | {
            key: value.astype(np.float64) if value.dtype == np.float32 else value
            for key, value in self.arrays.items()
        }

    def other_inputs(self, masked: bool) -> dict:
        entry, experts = self.config.get("entry"), self.config["experts"]
        slots = (TOKENS, self.config["topk"])
        arrays = {}
        if entry == "logits":
            arrays["logits"] = self.rng.standard_normal((TOKENS, experts)).astype(np.float32)
        if entry == "ids":
            arrays["given_ids"] = self.rng.integers(-1, experts + 1, slots).astype(np.int32)
            arrays["given_weights"] = self.rng.uniform(0.1, 1, slots).astype(np.float32)
        if masked:
            arrays["padding_mask"] = np.arange(TOKENS) % 3 == 1
        return arrays

    def reference(self, ids=None):
        return reference.layer(self.inputs, self.exact, self.config, ids)

    def run(self, **options):
        return self.layer.forward(self.x, self.params, **self.arrays, **options)


def error(found, wanted) -> float:
    """Largest error, relative to the largest number; and nothing may be NaN."""
    scale = np.abs(wanted).max(initial=0)
    return 0 if scale == 0 == np.abs(found).max(initial=0) else np.abs(found - wanted).max() / scale


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, dtype: str) -> None:
    case = Case(name, dtype, masked=name == "losses")
    found = case.run()
    out, ids, weights, losses = case.reference()
    assert found.out.dtype == case.x.dtype
    assert error(case.decode(found.out), out) <= BOUND[dtype]
    if found.topk_ids is not None:
        seen = ids[:, :1] >= 0
        assert np.array_equal(found.topk_ids, ids)
        assert error(found.topk_weights, np.where(seen, weights, 0)) <= 2e-6
    if found.losses is not None:
        assert error(found.losses, losses) <= 2e-6
    kept = ids[(ids >= 0) & (ids < case.config["experts"])]
    assert np.array_equal(found.counts, np.bincount(kept, minlength=case.config["experts"]))


def exact_gradients(case: Case, ids):
    """Gradients of <out, dout> plus the router losses, by central differences."""
    dout = case.decode(case.dout)

    def loss():
        out, _, _, losses = case.reference(ids)
        return (out * dout).sum() + losses.sum()

    wanted = {name: reference.gradient(loss, case.exact[name]) for name in case.exact}
    for name in ("x", "logits", "given_weights"):
        if name in case.inputs:
            wanted[name] = reference.gradient(loss, case.inputs[name])
    return wanted


@pytest.mark.parametrize("name", CASES)
def test_backward(name: str) -> None:
    case = Case(name, "fp32", masked=name in ("losses", "groups"))
    result = case.run()
    grads = case.layer.backward(result, case.dout)
    ids = case.reference()[1]
    chosen = np.maximum(ids, 0) if case.config.get("entry") != "ids" else None
    wanted = exact_gradients(case, chosen)
    found = {**grads.params, "x": grads.x}
    found |= {"logits": grads.logits} if "logits" in wanted else {}
    found |= {"given_weights": grads.topk_weights} if "given_weights" in wanted else {}
    assert found.keys() == wanted.keys() - {"correction_bias"}
    for key, value in found.items():
        assert value.dtype == np.float32
        assert error(value, wanted[key]) <= 1e-5, key


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_backward_in_short_formats(dtype: str) -> None:
    case = Case("gpt-oss", dtype)
    grads = case.layer.backward(case.run(), case.dout)
    wanted = exact_gradients(case, case.reference()[1])
    assert error(case.decode(grads.x), wanted["x"]) <= 2 * BOUND[dtype]
    for key, value in grads.params.items():
        plain = value if key == "router_bias" else case.decode(value)
        assert error(plain, wanted[key]) <= 2 * BOUND[dtype], key


def test_a_wrong_answer_is_noticed() -> None:
    """The bounds are tight enough to see one weight of one expert that differs by a percent."""
    case = Case("softmax", "fp32")
    out, ids, _, _ = case.reference()
    e = ids[0, 0]
    case.params["w2"][e, 0, 0] *= 1.01
    found = case.run()
    assert error(found.out, out) > BOUND["fp32"]


def test_rows() -> None:
    """Rows sorted by expert are the same as one choice a token with those ids."""
    rng = np.random.default_rng(0)
    config = {**BASE, "topk": 1}
    rows, ids = Layer(entry="rows", **config), Layer(entry="ids", **config)
    x = rng.standard_normal((5, 8)).astype(np.float32)
    params = {n: rng.standard_normal(rows.shapes[n]).astype(np.float32) for n in ("w1", "w2")}
    weights = rng.uniform(0.1, 1, 5).astype(np.float32)
    offsets = np.array([0, 2, 2, 4, 5], np.int32)
    by_rows = rows.forward(x, params, given_weights=weights, row_offset=offsets)
    by_ids = ids.forward(
        x,
        params,
        given_weights=weights[:, None],
        given_ids=np.array([0, 0, 2, 2, 3], np.int32)[:, None],
    )
    assert np.array_equal(by_rows.out, by_ids.out)
    with pytest.raises(ArgumentError, match="token_count is given, wanted NULL: with"):
        rows.forward(x, params, given_weights=weights, row_offset=offsets, token_count=3)
    a, b = rows.backward(by_rows, x), ids.backward(by_ids, x)
    assert np.array_equal(a.x, b.x) and np.array_equal(a.topk_weights, b.topk_weights[:, 0])
    assert all(np.array_equal(a.params[n], b.params[n]) for n in params)


def test_gradients_accumulate() -> None:
    case = Case("softmax", "bf16")
    layer = Layer(dtype="bf16", grad_dtype="fp32", **case.config)
    result = layer.forward(case.x, case.params)
    once = layer.backward(result, case.dout)
    into = {"w1": np.ones(layer.shapes["w1"], np.float32)}
    again = layer.backward(result, case.dout, into=into)
    assert again.params.keys() == {"w1"} and again.params["w1"] is into["w1"]
    assert error(into["w1"], once.params["w1"] + 1.0) <= 1e-6
    assert once.params["w1"].dtype == np.float32


def test_losses_can_be_left_out() -> None:
    case = Case("losses", "fp32")
    plain = Layer(**{**BASE, "router": {}})
    wanted = plain.backward(plain.forward(case.x, case.params), case.dout)
    result = case.run()
    for options in ({"skip_losses": True}, {"loss_scale": 0}):
        found = case.layer.backward(result, case.dout, **options)
        assert np.array_equal(found.x, wanted.x)
    scaled = case.layer.backward(result, case.dout, loss_scale=2.0)
    once = case.layer.backward(result, case.dout)
    assert error(scaled.x - wanted.x, 2 * (once.x - wanted.x)) <= 1e-5


def test_global_counts() -> None:
    config = {**BASE, "router": {"balance": "global", "balance_coeff": 1}}
    case = Case("softmax", "fp32")
    layer, counts = Layer(**config), np.zeros(5, np.int64)
    for call in (1, 2):
        found = layer.forward(case.x, case.params, global_counts=counts)
        assert np.array_equal(counts, call * np.append(found.counts, TOKENS))
    assert found.losses[0] > 0


@pytest.mark.parametrize("name", ["losses", "transposed, shared", "ids", "logits"])
@pytest.mark.parametrize("count", [-(2**40), 0, 3, TOKENS, 2**40])
def test_token_count(name: str, count: int) -> None:
    """The tokens up to the count are the layer on those alone, to the bit; the others give 0."""
    case, kept = Case(name, "fp32"), min(max(count, 0), TOKENS)
    x, dout = case.x.copy(), case.dout.copy()
    x[kept:], dout[kept:] = np.nan, np.inf
    result = case.layer.forward(x, case.params, **case.arrays, token_count=np.array([count]))
    grads = case.layer.backward(result, dout)
    arrays = {key: value[:kept] for key, value in case.arrays.items()}
    wanted = case.layer.forward(x[:kept], case.params, **arrays)
    alone = case.layer.backward(wanted, dout[:kept])
    rows = [(result.out, wanted.out), (grads.x, alone.x)]
    rows += [(grads.logits, alone.logits)] if "logits" in arrays else []
    rows += [(grads.topk_weights, alone.topk_weights)] if name == "ids" else []
    for found, those in rows:
        assert np.array_equal(found[:kept], those) and not found[kept:].any()
    assert np.array_equal(result.counts, wanted.counts)
    assert result.losses is None or np.array_equal(result.losses, wanted.losses)
    assert all(np.array_equal(grads.params[key], alone.params[key]) for key in case.params)


def test_token_count_is_kept_for_backward() -> None:
    """An array of the caller's may hold the next count before backward runs."""
    case, count = Case("softmax", "fp32"), np.array([4], np.int32)
    result = case.run(token_count=count)
    wanted = case.layer.backward(result, case.dout)
    count[0] = 1
    assert np.array_equal(case.layer.backward(result, case.dout).x, wanted.x)


def test_no_tokens() -> None:
    case = Case("softmax", "fp32")
    empty = np.empty((0, 8), np.float32)
    result = case.layer.forward(empty, case.params)
    grads = case.layer.backward(result, empty)
    assert result.out.shape == (0, 8) and not grads.params["w1"].any()


def test_arrays_with_gaps() -> None:
    case = Case("softmax", "fp32")
    wanted = case.run().out
    case.x = np.repeat(case.x, 2, axis=1)[:, ::2]
    case.params["w1"] = np.asfortranarray(case.params["w1"])
    unaligned = np.empty(case.params["w2"].size + 1, np.float32)[1:]
    unaligned[:] = case.params["w2"].ravel()
    case.params["w2"] = unaligned.reshape(case.params["w2"].shape)
    assert np.array_equal(case.run().out, wanted)


def test_inference_keeps_nothing() -> None:
    case = Case("softmax", "fp32")
    result = case.run(save=False)
    assert np.array_equal(result.out, case.run().out)
    with pytest.raises(ArgumentError, match="save=False"):
        case.layer.backward(result, case.dout)


def test_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = Case("softmax", "bf16")
    wanted = case.run()
    typed = {n: a.view(ml_dtypes.bfloat16) for n, a in case.params.items()}
    found = case.layer.forward(case.x.view(ml_dtypes.bfloat16), typed)
    assert found.out.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found.out.view(np.uint16), wanted.out)
    grads = case.layer.backward(found, case.dout.view(ml_dtypes.bfloat16))
    assert grads.x.dtype == grads.params["w1"].dtype == ml_dtypes.bfloat16


def test_bf16_rounding() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    numbers = from_bf16(every)
    finite = np.isfinite(numbers)
    assert np.array_equal(to_bf16(numbers)[finite], every[finite])
    assert np.isnan(from_bf16(to_bf16(numbers[np.isnan(numbers)]))).all()
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    assert to_bf16(ties).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


def refused(**changed):
    case = Case(changed.pop("case", "softmax"), changed.pop("dtype", "fp32"))
    x = changed.pop("x", case.x)
    params = {**case.params, **changed.pop("params", {})}
    return case.layer.forward(x, params, **{**case.arrays, **changed})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"x": np.zeros(8, np.float32)}, "x has 1 dimensions, wanted 2"),
        ({"x": np.zeros((7, 9), np.float32)}, r"x.shape = \(7, 9\), wanted \(7, 8\)"),
        ({"x": np.zeros((7, 8))}, r"x.dtype = float64, wanted float32 \(FP32\)"),
        ({"dtype": "bf16", "x": np.zeros((7, 8), np.int16)}, r"wanted uint16 \(BF16\)"),
        (
            {"params": {"w3": np.zeros(1)}},
            "params.w3 is unknown, wanted router_weight, ",
        ),
        (
            {"params": {"w1": np.zeros((4, 6, 8), np.float32)}},
            r"w1.shape = \(4, 6, 8\), wanted",
        ),
        ({"params": {"w1": None}}, "params.w1 = NULL"),
        ({"params": {"shared_gate": np.zeros(8, np.float32)}}, "shared_gate"),
        ({"padding_mask": np.zeros(7)}, "padding_mask.dtype = float64, wanted uint8"),
        ({"token_count": 3.0}, r"token_count is float64\[\], wanted one integer"),
        ({"token_count": [3, 4]}, r"token_count is int64\[2\], wanted one integer"),
        ({"logits": np.zeros((7, 4), np.float32)}, "logits"),
        (
            {"case": "ids", "given_ids": np.zeros((7, 2), np.int64)},
            "given_ids.dtype = int64",
        ),
        ({"case": "ids", "given_weights": None}, "given_weights = NULL"),
    ],
)
def test_refusals(changed: dict, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        refused(**changed)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"hidden": 0}, "plan: hidden = 0, wanted 1"),
        ({"topk": 65}, "topk = 65, wanted 1 .. 64"),
        ({"dtype": "int8"}, 'dtype = "int8", wanted one of default, fp32, bf16, fp16'),
        ({"hiden": 1}, "hiden is unknown, wanted one of hidden"),
        ({"inter": 1 << 70}, "inter = .*, which its field cannot hold"),
        ({"inter": 6.5}, "inter = 6.5, wanted a number"),
        ({"act": "swish"}, 'name = "swish"'),
        ({"act": 99}, "act.kind = 99, wanted a row"),
        ({"act": None}, "act.kind = None, wanted a number"),
        ({"act": {"kind": "relu", "layout": "mixed"}}, 'act.layout = "mixed", wanted one of'),
        ({"router": "softmax"}, "router = 'softmax', wanted a mapping"),
        ({"router": {"score": "best"}}, 'router.score = "best", wanted one of softmax'),
        ({"capacity_factor": float("nan")}, "capacity_factor = nan"),
    ],
)
def test_refused_configurations(config: dict, sentence: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=sentence):
        Layer(**{**BASE, **config})
