# SPDX-License-Identifier: Apache-2.0
"""Replaces the experts of a Transformers model: two lines, and the same model otherwise."""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moeblas.hf

moeblas.hf.register()  # from here on "moeblas" is an experts_implementation of every model

config = Qwen3MoeConfig(
    vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_experts=16,
    num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32,
)  # fmt: skip
# With a checkpoint: AutoModelForCausalLM.from_pretrained(name, experts_implementation="moeblas")
model = AutoModelForCausalLM.from_config(config, experts_implementation="moeblas")
tokens = torch.randint(256, (2, 64))

for name in ("moeblas", "eager"):
    model.set_experts_implementation(name)
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = model.model.layers[0].mlp.experts.gate_up_proj.grad.norm()
    print(f"{name:8} loss {loss.item():.6f}  gradient of gate_up_proj {norm.item():.6f}")
