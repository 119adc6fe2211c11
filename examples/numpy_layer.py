# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer from NumPy: learns a random mapping by plain gradient descent."""

import numpy as np
from moeblas.numpy import Layer

router = {"score": "softmax", "renormalize": True, "balance": "batch", "balance_coeff": 0.01}
layer = Layer(hidden=16, inter=24, experts=8, topk=2, act="swiglu", router=router)

rng = np.random.default_rng(1)
params = {
    name: 0.3 * rng.standard_normal(layer.shapes[name], np.float32)
    for name in ("router_weight", "w1", "w2")
}
x = rng.standard_normal((256, 16), np.float32)
target = np.tanh(x @ rng.standard_normal((16, 16), np.float32))

for step in range(401):
    result = layer.forward(x, params)
    difference = result.out - target
    grads = layer.backward(result, 2 * difference / len(x))
    for name, param in params.items():
        param -= 0.05 * grads.params[name]
    if step % 100 == 0:
        loss, balance = (difference**2).sum(1).mean(), result.losses[0]
        print(f"step {step:3}  loss {loss:6.3f}  balance {balance:.4f}  {result.counts}")
