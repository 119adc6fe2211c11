# SPDX-License-Identifier: Apache-2.0
"""moeblas.hf against the experts of Transformers themselves: modules, whole models, refusals.

Reference of a module: its own eager forward in fp64. Our error is held against the error of the
eager forward in the type under test, so the bound follows from the rounding of that type.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import moeblas.hf  # noqa: E402
from moeblas import ArgumentError, UnsupportedError  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, INTER, EXPERTS, TOPK, TOKENS = 64, 48, 8, 3, 75

SMALL = dict(vocab_size=96, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None,
             eos_token_id=None, pad_token_id=None)  # fmt: skip
MLA = dict(num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16,
           qk_rope_head_dim=8, v_head_dim=16)  # fmt: skip
MODELS = {
    "Mixtral": dict(intermediate_size=INTER, num_local_experts=EXPERTS, num_experts_per_tok=TOPK),
    "Qwen3Moe": dict(moe_intermediate_size=INTER, num_experts=EXPERTS, num_experts_per_tok=TOPK,
                     head_dim=16, norm_topk_prob=True),
    "Olmoe": dict(intermediate_size=INTER, num_experts=EXPERTS, num_experts_per_tok=TOPK),
    "DeepseekV3": dict(intermediate_size=96, moe_intermediate_size=INTER, n_routed_experts=EXPERTS,
                       num_experts_per_tok=TOPK, n_shared_experts=1, n_group=2, topk_group=1,
                       first_k_dense_replace=1, **MLA),
    "GptOss": dict(intermediate_size=INTER, num_local_experts=EXPERTS, num_experts_per_tok=TOPK,
                   head_dim=16, sliding_window=8),
}  # fmt: skip


def make_model(
    name: str, device: str = "cpu", dtype=torch.float32, implementation="moeblas", **more
):
    moeblas.hf.register()
    config = getattr(transformers, name + "Config")(**{**SMALL, **MODELS[name], **more})
    torch.manual_seed(0)
    attention = "eager" if name == "GptOss" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():  # router logits far apart, all biases in play
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(device, dtype)


def make_config(base: type = object, **fields):
    """A stand-in for a configuration, with every name that a width or a count goes by."""
    common = dict(hidden_size=HIDDEN, intermediate_size=INTER, moe_intermediate_size=INTER,
                  num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS,
                  hidden_act="silu", mlp_hidden_act="silu",
                  _experts_implementation="eager")  # fmt: skip
    return type("Config", (base,), {**common, **fields})()


def fill(module, dtype, device: str, spread: float = 1.0):
    """Random weights of a known spread."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=spread * HIDDEN**-0.5)
    return module.to(device, dtype)


def make_experts(path: str, dtype, device: str, spread: float = 1.0, **config):
    """An experts module of Transformers by the path of its class, with random weights."""
    file, name = path.split(":")
    kind = getattr(importlib.import_module(f"transformers.models.{file}"), name)
    return fill(kind(make_config(**config)), dtype, device, spread)


# Path of the class, and what its configuration needs besides. A spread of 4 reaches the limits.
KINDS = {
    "mixtral": ("mixtral.modeling_mixtral:MixtralExperts", {}),
    "qwen3_moe": ("qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts", {}),
    "olmoe": ("olmoe.modeling_olmoe:OlmoeExperts", {}),
    "deepseek_v3": ("deepseek_v3.modeling_deepseek_v3:DeepseekV3Experts", {}),
    "gpt_oss": ("gpt_oss.modeling_gpt_oss:GptOssExperts", {"spread": 4.0}),
    "gelu": ("mixtral.modeling_mixtral:MixtralExperts", {"hidden_act": "gelu"}),
    "gelu_tanh": ("mixtral.modeling_mixtral:MixtralExperts", {"hidden_act": "gelu_pytorch_tanh"}),
    "gelu_new": ("mixtral.modeling_mixtral:MixtralExperts", {"hidden_act": "gelu_new"}),
    "quick_gelu": ("mixtral.modeling_mixtral:MixtralExperts", {"hidden_act": "quick_gelu"}),
    "relu": ("mixtral.modeling_mixtral:MixtralExperts", {"hidden_act": "relu"}),
    "relu2": ("mixtral.modeling_mixtral:MixtralExperts", {"hidden_act": "relu2"}),
    "deepseek_v4": ("deepseek_v4.modeling_deepseek_v4:DeepseekV4Experts",
                    {"swiglu_limit": 3.0, "spread": 4.0}),
    "minimax_m3": ("minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLExperts",
                   {"swiglu_limit": 3.0, "swiglu_alpha": 1.5, "spread": 4.0}),
    "glm5_next": ("glm5_next.modeling_glm5_next:Glm5NextTextExperts",
                  {"swiglu_limit": 3.0, "spread": 4.0}),
    "hy_v4": ("hy_v4.modeling_hy_v4:HYV4Experts", {"swiglu_limit": 3.0, "spread": 4.0}),
    "privacy_filter": ("openai_privacy_filter.modeling_openai_privacy_filter:"
                       "OpenAIPrivacyFilterExperts", {"spread": 4.0}),
    "nemotron_h": ("nemotron_h.modeling_nemotron_h:NemotronHExperts",
                   {"mlp_hidden_act": "relu2", "moe_latent_size": None}),
}  # fmt: skip


def make_kind(kind: str, dtype, device: str):
    path, more = KINDS[kind]
    try:
        return make_experts(path, dtype, device, **more)
    except ImportError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def make_routing(dtype, device: str):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    dout = torch.randn(TOKENS, HIDDEN, generator=generator)
    # Rounded to bf16 first, so that every type starts from the same numbers.
    hidden, weights, dout = (t.bfloat16().to(device, dtype) for t in (hidden, weights, dout))
    return hidden, ids.to(device), weights, dout


def run_experts(module, implementation: str, hidden, ids, weights, dout) -> dict[str, torch.Tensor]:
    """The output and every gradient of one call of an experts module."""
    moeblas.hf.register()
    module.config._experts_implementation = implementation
    module.zero_grad(set_to_none=True)
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(hidden, ids, weights)
    out.backward(dout)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"out": out.detach(), "dhidden": hidden.grad, "dweights": weights.grad, **grads}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check_close(found: dict, eager: dict, exact: dict, dtype) -> None:
    """No result is further from the exact one than 1.5 times the eager one, or a unit of rounding.

    In fp32 the sums count too: chains of 2F = 96 products cost a few units, blocked sums fewer.
    On CUDA so does the activation, whose exponential and reciprocal are good to 2^-21.
    """
    unit = max(torch.finfo(dtype).eps / 2, 8 * 2.0**-24)
    for name, wanted in exact.items():
        assert found[name].dtype == eager[name].dtype and found[name].shape == wanted.shape, name
        ours, theirs = distance(found[name], wanted), distance(eager[name], wanted)
        assert ours <= max(1.5 * theirs, unit), f"{name}: error {ours:.2e}, eager's is {theirs:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind: str, dtype, device: str) -> None:
    module = make_kind(kind, torch.bfloat16, device)
    routing = make_routing(dtype, device)
    exact = run_experts(
        copy.deepcopy(module).double(), "eager", *make_routing(torch.double, device)
    )
    module = module.to(dtype)
    # The privacy filter's own eager forward computes in fp32 whatever the type.
    yardstick = "grouped_mm" if kind == "privacy_filter" else "eager"
    eager = run_experts(module, yardstick, *routing)
    check_close(run_experts(module, "moeblas", *routing), eager, exact, dtype)


class AnyConfig:
    """Gives every class what it asks for: SiLU, and 8 of whatever has to do with experts."""

    swiglu_limit, swiglu_alpha, hidden_activation, moe_latent_size = 3.0, 1.5, "gelu", None

    def __getattr__(self, name: str):
        if "expert" in name and not name.startswith("__"):
            return EXPERTS
        raise AttributeError(name)


def every_experts_class() -> list[type]:
    """The classes of this Transformers that let a function stand in for their experts."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = re.findall(r"@use_experts_implementation.*\nclass (\w+)", path.read_text())
        if names:
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            found += [getattr(importlib.import_module(name), kind) for kind in names]
    return found


def test_every_class_of_transformers() -> None:
    """Each one gives what grouped_mm gives for it, or is refused."""
    routing = make_routing(torch.float32, "cpu")
    same, refused = [], []
    for kind in every_experts_class():
        module = fill(kind(make_config(AnyConfig)), torch.float32, "cpu", spread=2.0)
        try:
            found = run_experts(module, "moeblas", *routing)
        except UnsupportedError:
            refused.append(kind.__name__)
            continue
        wanted = run_experts(module, "grouped_mm", *routing)
        for name, value in wanted.items():
            assert distance(found[name], value) < 2e-6, f"{kind.__name__}: {name}"
        same.append(kind.__name__)
    assert len(same) >= 50 and len(refused) <= 2, f"refused: {refused}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_sentinels_contribute_nothing(kind: str, device: str) -> None:
    module = make_kind(kind, torch.float32, device)
    hidden, ids, weights, dout = make_routing(torch.float32, device)
    elsewhere = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)).to(device) < 0.4
    assert elsewhere.all(dim=1).any(), "wanted a token with no expert here"
    masked = weights.masked_fill(elsewhere, 0.0)
    wanted = run_experts(module, "eager", hidden, ids, masked, dout)
    wanted["dweights"] = wanted["dweights"].masked_fill(elsewhere, 0.0)
    for sentinel in (EXPERTS, -1):
        here = ids.masked_fill(elsewhere, sentinel)
        found = run_experts(module, "moeblas", hidden, here, masked, dout)
        for name, value in wanted.items():
            assert distance(found[name], value) < 1e-6, name
        assert not found["dweights"][elsewhere].any()


class Mesh:
    """As much of a device mesh as the expert-parallel router asks for."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def test_expert_parallel_ranks_add_up() -> None:
    """Transformers' own slicing of ids: the sum of two ranks is the whole layer."""
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    module = make_kind("gpt_oss", torch.float32, "cpu")
    hidden, ids, weights, dout = make_routing(torch.float32, "cpu")
    whole = run_experts(module, "moeblas", hidden, ids, weights, dout)
    router = type("Router", (), {"num_experts": EXPERTS})()
    total: dict[str, torch.Tensor] = {}
    for rank in range(2):
        with torch.no_grad():
            _, scores, local = parallel.EpRouterParallel().transform_output_post_forward(
                router, (None, weights, ids), Mesh(rank, 2)
            )
        assert (local == EXPERTS // 2).any(), "wanted sentinels"
        part = copy.deepcopy(module)
        part.num_experts = EXPERTS // 2
        for name, value in module.named_parameters():
            setattr(part, name, torch.nn.Parameter(value.detach().chunk(2)[rank].clone()))
        found = run_experts(part, "moeblas", hidden, local, scores, dout)
        for name in ("out", "dhidden", "dweights"):
            total[name] = total.get(name, 0) + found[name]
        for name, _ in module.named_parameters():
            assert distance(found[name], whole[name].chunk(2)[rank]) < 1e-6, name
    for name, value in total.items():
        assert distance(value, whole[name]) < 1e-6, name


def run_model(model) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a whole model on random tokens."""
    device = next(model.parameters()).device
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(4)).to(device)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_model_fp32(name: str, device: str) -> None:
    model = make_model(name, device)
    loss, grads = run_model(model)
    model.set_experts_implementation("eager")
    eager_loss, eager_grads = run_model(model)
    assert loss == pytest.approx(eager_loss, rel=1e-6)
    for parameter, wanted in eager_grads.items():
        assert distance(grads[parameter], wanted) < 2e-5, parameter


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_model_bf16(name: str, device: str) -> None:
    """One layer with experts, so that all implementations route alike; fp32 is the reference."""
    model = make_model(name, device, torch.bfloat16, num_hidden_layers=1, first_k_dense_replace=0)
    loss, grads = run_model(model)
    model.set_experts_implementation("eager")
    eager_loss, eager_grads = run_model(model)
    exact_loss, exact_grads = run_model(model.float())
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert abs(loss - exact_loss) <= max(1.5 * abs(eager_loss - exact_loss), unit * exact_loss)
    for parameter, wanted in exact_grads.items():
        ours, theirs = (distance(g[parameter], wanted) for g in (grads, eager_grads))
        assert ours <= max(1.5 * theirs, 2 * unit), (
            f"{parameter}: {ours:.2e}, eager's is {theirs:.2e}"
        )


@pytest.mark.parametrize("device", DEVICES)
def test_generate(device: str) -> None:
    model = make_model("Qwen3Moe", device).eval()
    prompt = torch.arange(6, device=device).view(1, 6)
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    found = model.generate(prompt, **options)
    model.set_experts_implementation("eager")
    assert torch.equal(found, model.generate(prompt, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_compile_fullgraph(name: str, device: str) -> None:
    model = make_model(name, device, num_hidden_layers=1)
    loss, grads = run_model(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    compiled_loss, compiled_grads = run_model(model)
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    for parameter, wanted in grads.items():
        assert distance(compiled_grads[parameter], wanted) < 1e-5, parameter


def test_gradient_checkpointing() -> None:
    model = make_model("Qwen3Moe").train()
    loss, grads = run_model(model)
    model.gradient_checkpointing_enable()
    again, checkpointed = run_model(model)
    assert again == loss
    assert all(torch.equal(checkpointed[name], value) for name, value in grads.items())


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str) -> None:
    """fp32 parameters under bf16 autocast; two layers, so a token near a tie may go elsewhere."""
    model = make_model("Mixtral", device)
    with torch.autocast(device, torch.bfloat16):
        loss, grads = run_model(model)
    model.set_experts_implementation("eager")
    with torch.autocast(device, torch.bfloat16):
        eager_loss, eager_grads = run_model(model)
    assert loss == pytest.approx(eager_loss, rel=2e-2)
    for name, wanted in eager_grads.items():
        assert grads[name].dtype == torch.float32 and grads[name].shape == wanted.shape
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    assert distance(grads[gate_up], eager_grads[gate_up]) < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graph(name: str) -> None:
    """Forward and backward of a whole model, captured once, replayed on other tokens."""
    model = make_model(name, "cuda", torch.bfloat16).train()
    attention = {"attention_mask": torch.zeros(1, 1, 24, 24, device="cuda", dtype=torch.bfloat16)}
    tokens = torch.randint(96, (2, 24), device="cuda")

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False, **attention).loss
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    tokens.copy_(torch.randint(96, (2, 24), device="cuda"))
    graph.replay()
    found = [captured.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    wanted = [step(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for a, b in zip(found, wanted, strict=True):  # attention's backward may add in any order
        assert torch.equal(a, b) or distance(a, b) < 1e-2


def refuse(module, match: str, error=UnsupportedError) -> None:
    hidden, ids, weights, dout = make_routing(torch.float32, "cpu")
    with pytest.raises(error, match=match):
        run_experts(module, "moeblas", hidden, ids, weights, dout)


def test_refuses_an_unknown_activation() -> None:
    path = KINDS["mixtral"][0]
    module = make_experts(path, torch.float32, "cpu", hidden_act="mish")
    refuse(module, "act_fn of MixtralExperts is MishActivation, wanted one of")


def test_refuses_a_gate_of_its_own() -> None:
    base = type(make_kind("mixtral", torch.float32, "cpu"))

    class Odd(base):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return gate.tanh() * up

    module = make_kind("mixtral", torch.float32, "cpu")
    module.__class__ = Odd
    refuse(module, "_apply_gate of Odd is .*Odd._apply_gate, which moeblas does not know")
    module = make_kind("mixtral", torch.float32, "cpu")
    module._apply_gate = module._apply_gate  # set on the module: anybody's
    refuse(module, "_apply_gate of MixtralExperts is")


def test_refuses_a_model_of_transformers_it_does_not_know() -> None:
    """Step 3.7 clamps after the activation."""
    try:
        module = make_experts("step3p7.modeling_step3p7:Step3p7Experts", torch.float32, "cpu")
    except ImportError as error:
        pytest.skip(str(error))
    module.has_gate, module.has_bias, module.is_transposed, module.is_concatenated = 1, 0, 0, 1
    hidden, ids, weights, _ = make_routing(torch.float32, "cpu")
    with pytest.raises(
        UnsupportedError, match="Step3p7Experts._apply_gate, which moeblas does not"
    ):
        moeblas.hf.experts_forward(module, hidden, ids, weights)


@pytest.mark.parametrize("limit", [None, 0.0, -1.0])
def test_refuses_a_limit_that_is_none(limit) -> None:
    module = make_kind("gpt_oss", torch.float32, "cpu")
    module.limit = limit
    refuse(module, f"limit of GptOssExperts is {limit}, wanted > 0")


def test_refuses_flags_that_contradict() -> None:
    module = make_kind("gpt_oss", torch.float32, "cpu")
    module.is_concatenated = True
    refuse(module, "is_concatenated of GptOssExperts is True")
    module = make_kind("mixtral", torch.float32, "cpu")
    module.num_experts = EXPERTS - 1
    refuse(module, "gate_up_proj of MixtralExperts holds 8 experts, wanted 7", ArgumentError)


def test_name_is_known_only_after_register() -> None:
    with pytest.raises(ValueError, match="moeblas_other"):
        make_model("Qwen3Moe", implementation="moeblas_other")
    moeblas.hf.register("moeblas_other")
    try:
        make_model("Qwen3Moe", implementation="moeblas_other")
    finally:
        moeblas.hf.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("moeblas_other")
