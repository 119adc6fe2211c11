# SPDX-License-Identifier: Apache-2.0
"""The three models: Transformers' own classes, scaled to one GPU, and what a step of them costs.

Idea: only the experts differ between two runs, so everything else is the code that users of
Transformers run. Two things are replaced for all alike, through Transformers' public registry: the
attention (`causal_attention`: SDPA with is_causal, no mask tensor, so that no step waits for the
host), and GPT-OSS's sliding windows, which are full attention here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_COMMON = {"tie_word_embeddings": False, "use_cache": False, "bos_token_id": None}
_COMMON |= {"eos_token_id": None, "pad_token_id": None}

# Widths of one layer are those of the published model (gpt-oss-20b, Moonlight-16B-A3B, which is a
# small DeepSeek-V3, qwen3-30b-a3b); layers are left out until 2 to 3 B parameters remain.
_FULL: dict[str, dict[str, object]] = {
    "gpt-oss": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 3, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64,
    },
    "deepseek-v3": {
        "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
        "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "qwen3": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128,
    },
}  # fmt: skip
_TINY: dict[str, dict[str, object]] = {
    "gpt-oss": {
        "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
    "deepseek-v3": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "qwen3": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16,
    },
}  # fmt: skip
_SIZES = {"full": _FULL, "tiny": _TINY}
_CONFIGS = {"gpt-oss": GptOssConfig, "deepseek-v3": DeepseekV3Config, "qwen3": Qwen3MoeConfig}
MODELS = tuple(_CONFIGS)
ATTENTION = "pretrain_causal"


def _with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepends a position whose score is ``sink`` for every query and whose value is 0.

    One more head dimension carries the score: sink/scale in the queries, 1 in that one key. It is
    padded to a multiple of 8, which the fast kernels want.
    """
    batch, heads, tokens, _ = query.shape
    column = (sink / scale).to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, tokens, 1)
    query = F.pad(torch.cat([query, column], dim=-1), (0, 7, 1, 0))
    key, value = F.pad(key, (0, 8, 1, 0)), F.pad(value, (0, 8, 1, 0))
    mark = torch.zeros_like(key[:1, :1])
    mark[..., 0, -8].fill_(1)
    return query, key + mark, value


def causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal SDPA over [batch, heads, tokens, width]; ``s_aux`` are the sinks of GPT-OSS, [heads].

    Returns the output as [batch, tokens, heads, width] and no attention weights. Values that are
    narrower than keys (DeepSeek-V3) are padded: the fastest kernel wants one width.
    """
    if attention_mask is not None or getattr(module, "sliding_window", None) is not None:
        raise ValueError(
            "pretrain: attention with a mask or a window, wanted plain causal attention"
        )
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
    if s_aux is not None:
        query, key, value = _with_sink(query, key, value, s_aux, scaling)
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    first = 0 if s_aux is None else 1
    return out[:, :, first:, :width].transpose(1, 2).contiguous(), None


def make_config(model: str, size: str, vocab: int, sequence: int) -> PreTrainedConfig:
    """The configuration of ``model`` (see MODELS) at ``size`` ("full" or "tiny")."""
    fields = dict(
        _SIZES[size][model], vocab_size=vocab, max_position_embeddings=sequence, **_COMMON
    )
    if model == "gpt-oss":
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 150000.0}
    return _CONFIGS[model](**fields)


def build(
    config: PreTrainedConfig,
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> PreTrainedModel:
    """A model with random weights, the same for equal seeds whatever the experts implementation."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, causal_attention)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            experts_implementation=implementation,
        )
    return model.train()


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold routed experts."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "down_proj") and hasattr(module, "num_experts")
    ]


def flops_per_token(model: PreTrainedModel, sequence: int) -> float:
    """Useful FLOPs of forward and backward a token: 6 a weight it meets, plus causal attention.

    Routed experts count with topk / experts of their weights; the embedding is a look-up.
    """
    config = model.config
    experts = {id(p) for module in experts_of(model) for p in module.parameters()}
    active = 0.0
    for name, weight in model.named_parameters():
        if id(weight) in experts:
            if weight.dim() == 3:
                active += weight.numel() * config.num_experts_per_tok / weight.shape[0]
        elif weight.dim() == 2 and "embed_tokens" not in name:
            active += weight.numel()
    width = config.head_dim * 2
    if hasattr(config, "kv_lora_rank"):
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    attention = 3 * width * config.num_attention_heads * sequence * config.num_hidden_layers
    return 6 * active + attention
