# SPDX-License-Identifier: Apache-2.0
"""The modules, and the layer in torch's machinery: compile, checkpoint, autocast, FSDP2, graphs."""

from __future__ import annotations

import copy
import os

import pytest

torch = pytest.importorskip("torch")

import moeblas.torch as mt
import torch_layer as plain
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

HIDDEN, INTER, COUNT, TOPK = 32, 24, 8, 2


def make_moe(device="cpu", dtype=None, **options):
    torch.manual_seed(1)
    return mt.MoE(
        HIDDEN, INTER, COUNT, TOPK, renormalize=True, device=device, dtype=dtype, **options
    )


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters()}


class Model(nn.Module):
    """A layer between two others, with the losses that a model adds up."""

    def __init__(self, device="cpu", **options):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(HIDDEN, HIDDEN, device=device)
        self.moe = make_moe(device, balance="batch", balance_coeff=0.1, z_coeff=0.01, **options)
        self.last = nn.Linear(HIDDEN, 1, device=device)

    def forward(self, x):
        out, routing = self.moe(self.first(x))
        return self.last(x + out).square().mean() + routing.balance_loss + routing.z_loss


# ---- the modules themselves


def test_parameters_are_plain():
    """Names and shapes of a checkpoint; nothing else in the state."""
    module = make_moe(
        shared_inter=16, shared_gate=True, latent=16, bias=True, router_bias=True,
        correction_bias=True, router_dtype=torch.float32, dtype=torch.bfloat16,
    )  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "router_weight": (8, 32),
        "router_bias": (8,),
        "w1": (8, 48, 16),
        "w2": (8, 16, 24),
        "b1": (8, 48),
        "b2": (8, 16),
        "shared_w1": (32, 32),
        "shared_w2": (32, 16),
        "shared_gate": (32,),
        "latent_down": (16, 32),
        "latent_up": (32, 16),
        "correction_bias": (8,),
    }
    assert module.router_weight.dtype == module.router_bias.dtype == torch.float32
    assert module.correction_bias.dtype == torch.float32 and module.w1.dtype == torch.bfloat16
    assert all(type(p) is nn.Parameter for p in module.parameters())
    out, _ = module(torch.randn(3, 5, HIDDEN, dtype=torch.bfloat16))
    assert out.shape == (3, 5, HIDDEN) and out.dtype == torch.bfloat16


def test_transposed_holds_the_same_layer():
    module, other = (
        make_moe(latent=16, shared_inter=8),
        make_moe(latent=16, shared_inter=8, transposed=True),
    )
    names = ("w1", "w2", "shared_w1", "shared_w2", "latent_down", "latent_up")
    state = {k: v.mT.contiguous() if k in names else v for k, v in module.state_dict().items()}
    other.load_state_dict(state)
    x = torch.randn(7, HIDDEN)
    assert torch.equal(module(x)[0], other(x)[0])


def test_reset_repr_and_copy():
    module = mt.Experts(HIDDEN, INTER, COUNT, bias=True, act="geglu", device="meta")
    assert repr(module) == "Experts(hidden=32, inter=24, experts=8, act=geglu)"
    module.to_empty(device="cpu").reset_parameters()
    assert module.w1.abs().max() <= HIDDEN**-0.5 and module.w2.abs().max() <= INTER**-0.5
    assert module.w1.std() > 0.5 * HIDDEN**-0.5 and module.b1.abs().max() > 0
    assert "topk=2, renormalize=True" in repr(make_moe())
    x = torch.randn(4, HIDDEN)
    ids, weights = torch.randint(0, COUNT, (4, 3)), torch.rand(4, 3)
    assert torch.equal(module(x, ids, weights), copy.deepcopy(module)(x, ids, weights))
    masked = module(x, ids, weights, torch.tensor([True, False, False, True]))
    assert (masked[[0, 3]] == 0).all() and torch.equal(masked[1:3], module(x, ids, weights)[1:3])


def test_state_of_the_router():
    """Global counts grow in training only; the correction bias moves towards an even load."""
    module = make_moe(balance="global", balance_coeff=1.0, correction_bias=True)
    x = torch.randn(20, HIDDEN)
    _, routing = module(x)
    assert torch.equal(module.global_counts[:-1], routing.counts.long())
    assert module.global_counts[-1] == 20
    module.eval()(x)
    assert module.global_counts[-1] == 20
    module.update_correction_bias(routing.counts, 0.25)
    assert torch.equal(module.correction_bias, 0.25 * torch.sign(5 - routing.counts.float()))
    before = routing.counts.float().std()
    for _ in range(40):
        module.update_correction_bias(module(x)[1].counts, 0.02)
    assert module(x)[1].counts.float().std() < before
    replay = torch.full((20, TOPK), 3)
    replay[:, 1] = 5
    assert module(x, ids=replay)[1].counts.tolist() == [0, 0, 0, 20, 0, 20, 0, 0]


@pytest.mark.parametrize("device", plain.DEVICES)
def test_learns(device):
    """A few steps bring the loss of a small model down."""
    model = Model(device, shared_inter=16)
    x = torch.randn(64, HIDDEN, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    values = []
    for _ in range(30):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.7 * values[0]


# ---- inside torch


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("layer", ["experts", "moe"])
def test_compile_with_any_number_of_tokens(layer, device):
    """One graph, one recompilation when the number of tokens first changes, the bits of eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = make_moe(device, balance="batch", balance_coeff=0.1)

    def run(x, ids, weights):
        if layer == "experts":
            return mt.experts(2 * x, ids, weights, module.w1, module.w2).sum()
        out, routing = module(2 * x)
        return out.sum() + routing.balance_loss

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for tokens in (13, 7, 64, 29, 100):
        torch.manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
        ids = torch.randint(-1, COUNT, (tokens, TOPK), device=device)
        weights = torch.rand(tokens, TOPK, device=device)
        leaves = (x, module.w1, module.w2)
        found, wanted = compiled(x, ids, weights), run(x, ids, weights)
        assert torch.equal(found, wanted)
        for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves)):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("device", plain.DEVICES)
def test_compile_dynamic_from_the_start(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = make_moe(device)
    compiled = torch.compile(lambda x: module(x)[0], backend=counter, fullgraph=True)
    for tokens in (13, 7, 64):
        x = torch.randn(tokens, HIDDEN, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), module(x)[0])
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", plain.DEVICES)
def test_export(device):
    """An exported program holds the operator and takes any number of tokens."""
    module = make_moe(device)
    x = torch.randn(13, HIDDEN, device=device)
    shapes = ({0: torch.export.Dim("tokens")},)
    program = torch.export.export(_OutOnly(module), (x,), dynamic_shapes=shapes)
    assert "moeblas.forward" in program.graph_module.code
    other = torch.randn(29, HIDDEN, device=device)
    assert torch.equal(program.module()(other), module(other)[0])


class _OutOnly(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(x)[0]


@pytest.mark.parametrize("device", plain.DEVICES)
def test_compile_by_inductor(device):
    """The default back end runs the operators alone: for more its C++ compiler takes a minute."""
    torch._dynamo.reset()
    module = make_moe(device)
    p = [module.w1, module.w2]

    def run(x, ids, weights):
        return mt.experts(x, ids, weights, *p)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for tokens in (24, 31):
        x = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
        ids = torch.randint(-1, COUNT, (tokens, TOPK), device=device, dtype=torch.int32)
        weights = torch.rand(tokens, TOPK, device=device, requires_grad=True)
        dout = torch.randn(tokens, HIDDEN, device=device)
        found, wanted = compiled(x, ids, weights), run(x, ids, weights)
        assert torch.equal(found, wanted)
        leaves = (x, weights, *p)
        got = torch.autograd.grad(found, leaves, dout)
        assert all(map(torch.equal, got, torch.autograd.grad(wanted, leaves, dout)))


@plain.needs_cuda
def test_compile_a_model_by_inductor():
    torch._dynamo.reset()
    model = Model("cuda")
    x = torch.randn(24, HIDDEN, device="cuda")
    model(x).backward()
    wanted = gradients(model)
    model.zero_grad()
    torch.compile(model, fullgraph=True)(x).backward()
    for name, grad in gradients(model).items():
        plain.assert_close(grad, wanted[name], 1e-4, name)


@pytest.mark.parametrize("device", plain.DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device):
    """Running forward again gives the same bits."""
    model = Model(device)
    x = torch.randn(24, HIDDEN, device=device, requires_grad=True)
    model(x).backward()
    wanted, dx = gradients(model), x.grad
    model.zero_grad()
    x.grad = None
    checkpoint(model, x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, dx)
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(model).items())


@pytest.mark.parametrize("device", plain.DEVICES)
def test_autocast(device):
    """fp32 parameters run in bf16, the router in fp32; gradients arrive in fp32."""
    module = make_moe(device, bias=True, router_bias=True, shared_inter=16)
    x = torch.randn(24, HIDDEN, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out, routing = module(x)
        given = mt.experts(x, routing.ids, routing.weights, module.w1, module.w2)
    assert out.dtype == given.dtype == torch.bfloat16
    out.float().square().sum().backward()
    names = ("w1", "w2", "b1", "b2", "shared_w1", "shared_w2")
    found = gradients(module)
    assert x.grad.dtype == torch.float32 and all(g.dtype == torch.float32 for g in found.values())
    short = copy.deepcopy(module)
    for name in names:
        setattr(short, name, nn.Parameter(getattr(module, name).detach().bfloat16()))
    short.zero_grad()
    wanted, again = short(x.detach().bfloat16())
    assert torch.equal(again.ids, routing.ids) and torch.equal(wanted, out)
    wanted.float().square().sum().backward()
    for name in names:
        assert torch.equal(getattr(short, name).grad.float(), found[name]), name
    with torch.autocast(device, enabled=False):
        assert module(x)[0].dtype == torch.float32


@pytest.mark.parametrize("device", plain.DEVICES)
def test_grad_scaler_scales_the_losses(device):
    """The gradients of the losses follow what multiplies them, without a look at its value."""
    model = Model(device)
    x = torch.randn(24, HIDDEN, device=device)
    model(x).backward()
    wanted = gradients(model)
    model.zero_grad()
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    scaler.scale(model(x)).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad / 256, wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", plain.DEVICES)
def test_fully_shard(device, tmp_path):
    """FSDP2 (one process) shards the parameters as any others, and trains to the same gradients."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(
        backend, rank=0, world_size=1, store=distributed.FileStore(str(tmp_path / "s"), 1)
    )
    try:
        model = Model(device)
        x = torch.randn(24, HIDDEN, device=device)
        model(x).backward()
        wanted = gradients(model)
        model.zero_grad()
        mesh = distributed.init_device_mesh(device, (1,))
        fully_shard(model.moe, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert isinstance(model.moe.w1, distributed.tensor.DTensor)
        model(x).backward()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad.full_tensor(), wanted[name]), name
    finally:
        distributed.destroy_process_group()


def iteration(module, x):
    """Forward, loss and backward, of operators whose bits can be compared."""
    out, routing = module(x)
    loss = out.float().square().mean() + routing.balance_loss + routing.z_loss
    loss.backward()
    return loss


@plain.needs_cuda
def test_cuda_graph():
    """Forward and backward in one graph; replays with other tokens give the bits of eager calls."""
    losses = {"balance": "batch", "balance_coeff": 0.1, "z_coeff": 0.01}
    module = make_moe("cuda", torch.bfloat16, shared_inter=16, bias=True, **losses)
    x = torch.randn(96, HIDDEN, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            iteration(module, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    module.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = iteration(module, x)
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(torch.randn(96, HIDDEN, device="cuda"))
        graph.replay()
        again = copy.deepcopy(module)
        again.zero_grad(set_to_none=True)
        assert torch.equal(loss, iteration(again, x))
        wanted = gradients(again)
        assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(module).items())


@plain.needs_cuda
def test_token_count_in_a_graph():
    """One graph serves every number of tokens up to the captured one."""
    module = make_moe("cuda", dtype=torch.bfloat16)
    p = dict(module.named_parameters())
    x = torch.randn(64, HIDDEN, device="cuda", dtype=torch.bfloat16)
    count = torch.tensor([64], dtype=torch.int32, device="cuda")
    options = {"topk": TOPK, "renormalize": True}
    with torch.no_grad():
        mt.moe(x, **p, token_count=count, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = mt.moe(x, **p, token_count=count, **options)
        for tokens in (64, 1, 0, 17):
            count.fill_(tokens)
            graph.replay()
            assert torch.equal(out[:tokens], module(x[:tokens])[0])
            assert (out[tokens:] == 0).all()
