# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer in JAX: router, experts, balancing loss. Learns a random mapping."""

import jax
import jax.numpy as jnp

import moeblas.jax

shapes = {"router_weight": (8, 16), "w1": (8, 2 * 24, 16), "w2": (8, 16, 24)}
keys = jax.random.split(jax.random.key(0), 5)
params = {name: 0.3 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys)}
x = jax.random.normal(keys[3], (256, 16))
target = jnp.tanh(x @ jax.random.normal(keys[4], (16, 16)))


@jax.jit
def step(params):
    def loss(params):
        options = {"renormalize": True, "balance": "batch", "balance_coeff": 0.01}
        out, aux = moeblas.jax.moe(x, **params, topk=2, **options)
        return ((out - target) ** 2).sum(1).mean() + aux.balance_loss, aux

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value, aux.counts


for i in range(201):
    params, value, counts = step(params)
    if i % 50 == 0:
        print(f"step {i:3}  loss {value:6.3f}  {counts}")
