# SPDX-License-Identifier: Apache-2.0
"""What the JAX tests share: the platforms, random layers, comparisons."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import moeblas

CPU = jax.devices("cpu")[0]
# Rounding steps on the longest way from an input to a gradient, h, a, dh, dx and the output itself,
# each of half a spacing of the type; sums of up to 64 float32 terms for the rest.
SPACING = {"float32": 2.0**-23 * 16, "bfloat16": 2.0**-8, "float16": 2.0**-11}
TOLERANCE = {dtype: 2.5 * spacing for dtype, spacing in SPACING.items()}
GPT_OSS = {
    "layout": "interleaved",
    "alpha": 1.702,
    "gate_max": 1.0,
    "up_min": -1.0,
    "up_max": 1.0,
    "up_offset": 1.0,
}


def gpu():
    """A device of CUDA that the library can use, or None."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    return devices[0] if moeblas.backend_available("cuda") is None else None


@pytest.fixture(params=["cpu", "gpu"])
def device(request):
    """Makes the platform the default one of the test."""
    found = CPU if request.param == "cpu" else gpu()
    if found is None:
        pytest.skip("no CUDA device for JAX, or a library without CUDA")
    with jax.default_device(found):
        yield found


class Problem:
    """Random arrays of a layer."""

    def __init__(self, tokens=33, hidden=32, inter=24, count=5, topk=2, dtype="float32", **options):
        self.random = np.random.default_rng(7)
        self.options, gated = options, options.get("act", "swiglu").endswith("glu")
        self.dtype, self.count, up = jnp.dtype(dtype), count, inter * (2 if gated else 1)
        self.ids = jnp.asarray(self.random.integers(0, count, (tokens, topk)), jnp.int32)
        self.arrays = {
            "x": self.normal(tokens, hidden, scale=1),
            "weights": jnp.asarray(self.random.random((tokens, topk)), jnp.float32),
            "w1": self.normal(count, up, hidden),
            "w2": self.normal(count, hidden, inter),
        }
        if options.get("transposed"):
            self.arrays |= {name: self.arrays[name].swapaxes(1, 2) for name in ("w1", "w2")}
        self.dout = self.normal(tokens, hidden, scale=1)

    def normal(self, *shape, scale=0.2):
        return jnp.asarray(self.random.standard_normal(shape) * scale, self.dtype)

    def with_biases(self):
        count, up = self.count, self.arrays["w1"].shape[2 if self.options.get("transposed") else 1]
        self.arrays |= {"b1": self.normal(count, up), "b2": self.normal(count, self.dout.shape[1])}
        return self

    def call(self, function, ids=None):
        """The function of a dictionary of arrays."""
        ids = self.ids if ids is None else ids
        return lambda arrays: function(ids=ids, **arrays, **self.options)

    def loss(self, function, ids=None):
        run = self.call(function, ids)
        return lambda arrays: (
            run(arrays).astype(jnp.float32) * self.dout.astype(jnp.float32)
        ).sum()


def assert_close(found, wanted, dtype, name=""):
    """Close relative to the largest element, as roundings inside sums are."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, name
    error = np.abs(found - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-30)
    assert error <= TOLERANCE[str(dtype)], f"{name}: error {error:.2e}"


def assert_same(found, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, wanted
    )


@functools.cache
def _compiled(function, options):
    quick = {"xla_backend_optimization_level": "0"}  # of the compilation
    return jax.jit(functools.partial(function, **dict(options)), compiler_options=quick)


def on_cpu(function, *args, **options):
    """The function on the CPU, with float32 for every float; compiled once for the same options."""

    def widened(array):
        return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array

    with jax.default_device(CPU):
        args = jax.tree.map(widened, jax.device_put(args, CPU))
        return _compiled(function, tuple(sorted(options.items())))(*args)
