# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer in PyTorch: one training step, and its experts with ready routing.

python examples/torch_layer.py
"""

import torch

import moeblas.torch as mt

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = mt.MoE(hidden=256, inter=128, experts=16, topk=4, renormalize=True, shared_inter=128,
               balance="batch", balance_coeff=0.01, device=device)  # fmt: skip
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
x = torch.randn(8, 64, 256, device=device)

out, routing = torch.compile(layer)(x)
loss = (out - x).square().mean() + routing.balance_loss
loss.backward()
optimizer.step()
print(f"{device}: loss {loss.item():.4f}, slots by expert {routing.counts.tolist()}")

y = mt.experts(x, routing.ids, routing.weights, layer.w1, layer.w2, recompute=True)
print("experts alone:", tuple(y.shape), y.dtype)
