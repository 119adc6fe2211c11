# SPDX-License-Identifier: Apache-2.0
"""What the peers of bench/peers/ are measured by: problem strings, the reference, and that a wrong
layer is noticed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"
sys.path.insert(0, str(PEERS))

import case as cases
from peer_sonic import Sonic
from peer_torch import layer

TINY = "t24 h16 f8 e4 k2 fp32 swiglu given bwd skew=zipf # tiny"


def test_strings_are_those_of_the_tool() -> None:
    """Every line of the standing list is understood, and its text has neither pass nor comment."""
    problems = cases.read([f"@{PEERS.parents[1]}/tests/problems/bench_cuda.txt"])
    assert len(problems) >= 12
    assert all(problem.backward and problem.name for problem in problems)
    names = {problem.name: problem.text for problem in problems}
    assert names["qwen3-30b-a3b"] == "t16384 h2048 f768 e128 k8 bf16 swiglu given"


@pytest.mark.parametrize("text", ["t8 relu given", "t8 given bias", "t8", "t8 given skew=some"])
def test_what_peers_do_not_do_is_refused(text: str) -> None:
    """A field that would be ignored is an error that names it."""
    with pytest.raises(ValueError, match="given|relu|bias|skew"):
        cases.parse(text)


def gradients(case: cases.Case, function) -> dict[str, torch.Tensor]:
    """Results of a layer (x, p, w1, w2) -> out by autograd, named as the reference names them."""
    leaves = [v.clone().requires_grad_() for v in (case.x, case.p, case.w1, case.w2)]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, case.dout)
    return {"out": out.detach()} | dict(zip(("dx", "dp", "dw1", "dw2"), grads, strict=True))


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("skew", cases.SKEWS)
def test_the_reference_agrees_with_autograd(gather: bool, skew: str) -> None:
    """Both combinations of the torch peer, forward and all gradients, whatever the load."""
    case = cases.make(replace(cases.parse(TINY), skew=skew), "cpu")
    results = gradients(case, lambda x, p, w1, w2: layer(x, p, w1, w2, case.ids, gather))
    near, note = cases.compare(results, cases.reference(case), torch.float32)
    assert near, note


def test_a_wrong_layer_is_noticed() -> None:
    """Gate and up halves exchanged, one weight lost, a NaN: each alone is too far."""
    case = cases.make(cases.parse(TINY), "cpu")
    wanted = cases.reference(case)

    def exchanged(x, p, w1, w2):
        return layer(x, p, w1.roll(case.problem.inter, 1), w2, case.ids, True)

    def unweighted(x, p, w1, w2):
        return layer(x, torch.cat((p[:, :1], p[:, 1:] * 0.5), 1), w1, w2, case.ids, True)

    for wrong in (exchanged, unweighted):
        assert not cases.compare(gradients(case, wrong), wanted, torch.float32)[0]
    poisoned = {name: value.clone() for name, value in wanted.items()}
    poisoned["dw2"].view(-1)[3] = float("nan")
    assert not cases.compare(poisoned, wanted, torch.float32)[0]


def test_interleaving_is_undone() -> None:
    """SonicMoE's layout has gate rows at even places, and restore is its inverse."""
    w1 = torch.arange(2 * 6 * 3.0).view(2, 6, 3)
    sonic = Sonic()
    assert torch.equal(sonic.arrange(w1)[:, 0::2], w1[:, :3])
    assert torch.equal(sonic.restore(sonic.arrange(w1)), w1)
