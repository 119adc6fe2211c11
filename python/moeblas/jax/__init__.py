# SPDX-License-Identifier: Apache-2.0
"""The layer in JAX, under jit and grad: ``experts`` (routing given), ``rows`` (rows already sorted
by expert) and ``moe`` (router inside).

On the CPU and on CUDA, wherever XLA puts the arrays. Shapes: T tokens, H hidden, F inter, E
experts, k topk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from .._lib import ArgumentError, make_config, param_shapes
from .._options import ExpertOptions, RouterOptions, config_fields
from .._structs import Balance, Config
from ._layer import run_layer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Aux", "ExpertOptions", "MoeOptions", "experts", "moe", "rows"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class MoeOptions(ExpertOptions, RouterOptions, total=False):
    """Those of the experts and of the router."""


class Aux(NamedTuple):
    """What ``moe`` decided. Only the two losses carry gradients."""

    ids: jax.Array  #: [T,k] int32, the chosen experts; -1 where masked
    weights: jax.Array  #: [T,k] float32
    counts: jax.Array  #: [E] int32, slots that chose each expert, before capacity drops
    balance_loss: jax.Array  #: float32, balance_coeff included; 0 without ``balance``
    z_loss: jax.Array  #: float32, z_coeff included
    global_counts: jax.Array | None = None  #: like those given: these plus this call


# ---- arguments


def _checked(name: str, array: jax.Array, shape: tuple[int, ...], dtype: object) -> jax.Array:
    """Refuses an array that is not of the shape and type the layer needs."""
    array = jnp.asarray(array)
    if array.shape != shape or array.dtype != dtype:
        found = f"{array.dtype}{list(array.shape)}"
        raise ArgumentError(
            f"moeblas.jax: {name} is {found}, wanted {jnp.dtype(dtype)}{list(shape)}"
        )
    return array


def _floats(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """As float32, whatever float it is."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(f"moeblas.jax: {name} is of {array.dtype}, wanted floats")
    return _checked(name, array.astype(jnp.float32), shape, jnp.float32)


def _integers(name: str, array: jax.Array) -> jax.Array:
    """As an array, if it is one of integers."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ArgumentError(f"moeblas.jax: {name} is of {array.dtype}, wanted integers")
    return array


def _ids(ids: jax.Array, shape: tuple[int, ...], count: int) -> jax.Array:
    """Expert ids as int32; what is no expert stays none, however far out it is."""
    ids = _integers("ids", ids)
    narrow = ids.astype(jnp.int32)
    if ids.dtype.itemsize >= 4 and ids.dtype != jnp.int32:
        narrow = jnp.where((ids >= 0) & (ids < count), narrow, -1)
    return _checked("ids", narrow, shape, jnp.int32)


def _row_offset(offset: jax.Array, count: int) -> jax.Array:
    """[E+1] int32, from integers of any type."""
    offset = _integers("row_offset", offset).astype(jnp.int32)
    return _checked("row_offset", offset, (count + 1,), jnp.int32)


def _mask(mask: jax.Array, tokens: int) -> jax.Array:
    mask = jnp.asarray(mask)
    return _checked("padding_mask", (mask != 0).astype(jnp.uint8), (tokens,), jnp.uint8)


def _token_count(count: jax.Array | int, tokens: int) -> jax.Array:
    """[1] int32, from one integer of any type."""
    count = jnp.asarray(count)
    if not jnp.issubdtype(count.dtype, jnp.integer) or count.size != 1:
        found = f"{count.dtype}{list(count.shape)}"
        raise ArgumentError(f"moeblas.jax: token_count is {found}, wanted one integer")
    return jnp.clip(count, 0, tokens).astype(jnp.int32).reshape(1)


def _counts_as_words(counts: jax.Array, count: int) -> jax.Array:
    """[E+1,2] int32: 64-bit counts as the library has them, which JAX has only in its x64 mode."""
    counts = jnp.asarray(counts)
    if counts.dtype == jnp.int64:
        return jax.lax.bitcast_convert_type(
            _checked("global_counts", counts, (count + 1,), jnp.int64), jnp.int32
        )
    return _checked("global_counts", counts, (count + 1, 2), jnp.int32)


def _bookkeeping(
    config: Config,
    tokens: int,
    padding_mask: jax.Array | None,
    token_count: jax.Array | int | None,
    global_counts: jax.Array | None,
) -> dict[str, jax.Array]:
    """Which tokens take part, and the counts of earlier calls: those that are given, checked."""
    arrays = {}
    if padding_mask is not None:
        arrays["padding_mask"] = _mask(padding_mask, tokens)
    if token_count is not None:
        arrays["token_count"] = _token_count(token_count, tokens)
    if (config.router.balance == Balance.GLOBAL) != (global_counts is not None):
        raise ArgumentError(
            'moeblas.jax: one of balance = "global" and global_counts is missing, wanted both'
        )
    if global_counts is not None:
        arrays["global_counts"] = _counts_as_words(global_counts, config.experts)
    return arrays


def _config(x: jax.Array, w2: jax.Array, options: Mapping[str, object], **fields: object) -> Config:
    """The configuration of a layer on x [T,H] with w2 [E,H,F], or [E,F,H] when transposed."""
    if x.ndim != 2 or str(x.dtype) not in _DTYPES:
        wanted = "[tokens,hidden] of float32, bfloat16 or float16"
        raise ArgumentError(f"moeblas.jax: x is {x.dtype}{list(x.shape)}, wanted {wanted}")
    if jnp.ndim(w2) != 3:
        raise ArgumentError(
            f"moeblas.jax: w2 has {jnp.ndim(w2)} dimensions, wanted one matrix an expert"
        )
    return make_config(
        hidden=x.shape[1],
        inter=w2.shape[1 if options.get("transposed") else 2],
        experts=w2.shape[0],
        dtype=_DTYPES[str(x.dtype)],
        grad_dtype=_DTYPES[str(x.dtype)],
        **config_fields(options),
        **fields,
    )


def _known(options: Mapping[str, object], kind: type) -> dict[str, object]:
    """Refuses an option that there is not, rather than ignoring it."""
    for name in options:
        if name not in kind.__annotations__:
            wanted = ", ".join(sorted(kind.__annotations__))
            raise ArgumentError(f"moeblas.jax: option {name} is unknown, wanted one of {wanted}")
    return dict(options)


def _parameters(config: Config, x: jax.Array, given: Mapping[str, jax.Array | None]) -> dict:
    """The weights and biases that are given, checked against the configuration."""
    shapes = param_shapes(config)
    present = {name: array for name, array in given.items() if array is not None}
    for one, other in (("shared_w1", "shared_w2"), ("latent_down", "latent_up")):
        if (one in present) != (other in present):
            raise ArgumentError(f"moeblas.jax: one of {one} and {other} is None, wanted both")
    return {name: _checked(name, array, shapes[name], x.dtype) for name, array in present.items()}


def _score_fields(
    x: jax.Array, router_weight: jax.Array | None, logits: jax.Array | None
) -> dict[str, str]:
    """What the configuration says of the scores; they come from one of the two."""
    if (router_weight is None) == (logits is None):
        found = "both None" if logits is None else "both given"
        raise ArgumentError(
            f"moeblas.jax: router_weight and logits are {found}, wanted one of them"
        )
    if logits is None:
        own = jnp.asarray(router_weight).dtype == jnp.float32
        return {"router_dtype": "fp32" if own else _DTYPES.get(str(x.dtype), "default")}
    dtype = str(jnp.asarray(logits).dtype)
    if dtype not in _DTYPES:
        wanted = "float32, bfloat16 or float16"
        raise ArgumentError(f"moeblas.jax: logits is of {dtype}, wanted {wanted}")
    return {"entry": "logits", "logits_dtype": _DTYPES[dtype]}


def _router(
    config: Config, x: jax.Array, given: Mapping[str, jax.Array | None]
) -> dict[str, jax.Array]:
    """The arrays of the router that are given, checked against the configuration."""
    count, tokens = config.experts, x.shape[0]
    arrays = {name: jnp.asarray(array) for name, array in given.items() if array is not None}
    for name, array in arrays.items():
        if name == "router_weight":
            dtype = jnp.float32 if array.dtype == jnp.float32 else x.dtype
            arrays[name] = _checked(name, array, (count, config.hidden), dtype)
        elif name == "logits":
            arrays[name] = _checked(name, array, (tokens, count), array.dtype)
        elif name == "given_ids":
            arrays[name] = _ids(array, (tokens, config.topk), count)
        else:
            arrays[name] = _floats(name, array, (count,))
    return arrays


# ---- the layer


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    *,
    token_count: jax.Array | int | None = None,
    **options: Unpack[ExpertOptions],
) -> jax.Array:
    """The experts of a Mixture-of-Experts layer, for routing that is given.

    x [T,H] of float32, bfloat16 or float16; ids [T,k] integers, those outside [0,E) are skipped;
    weights [T,k] floats, used in float32. With U = 2F for gated activations, else F: w1 [E,U,H], w2
    [E,H,F], or with ``transposed`` [E,H,U] and [E,F,H]; b1 [E,U], b2 [E,H]; all of x's type. Tokens
    from ``token_count`` on, one integer, take no part and give 0. The options are those of
    ``ExpertOptions``.

    Returns out [T,H] of x's type, differentiable in all but ids. Raises ArgumentError and
    UnsupportedError while tracing, with the argument, what was found and what was wanted. Under
    vmap: NotImplementedError.
    """
    x, ids = jnp.asarray(x), jnp.asarray(ids)
    topk = ids.shape[-1] if ids.ndim else 0
    config = _config(x, w2, _known(options, ExpertOptions), entry="ids", topk=topk)
    slots = (x.shape[0], topk)
    arrays = _parameters(config, x, {"w1": w1, "w2": w2, "b1": b1, "b2": b2})
    arrays["given_ids"] = _ids(ids, slots, config.experts)
    arrays["given_weights"] = _floats("weights", weights, slots)
    arrays |= _bookkeeping(config, x.shape[0], None, token_count, None)
    return run_layer(bytes(config), {"x": x, **arrays})["out"]


def rows(
    x: jax.Array,
    row_offset: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    *,
    weights: jax.Array | None = None,
    **options: Unpack[ExpertOptions],
) -> jax.Array:
    """The experts on rows that are sorted by expert already, as expert parallelism has them.

    x [R,H]; row_offset [E+1] integers on the device: rows row_offset[e] .. row_offset[e+1]-1 are
    those of expert e. weights [R] floats, used in float32, or None for 1. The rest is as for
    ``experts``, the errors too.

    Returns out [R,H] of x's type, in which rows from row_offset[E] on are 0; differentiable in all
    but row_offset.
    """
    x = jnp.asarray(x)
    config = _config(x, w2, _known(options, ExpertOptions), entry="rows", topk=1)
    arrays = _parameters(config, x, {"w1": w1, "w2": w2, "b1": b1, "b2": b2})
    arrays["row_offset"] = _row_offset(row_offset, config.experts)
    if weights is not None:
        arrays["given_weights"] = _floats("weights", weights, x.shape[:1])
    return run_layer(bytes(config), {"x": x, **arrays})["out"]


def moe(
    x: jax.Array,
    router_weight: jax.Array | None,
    w1: jax.Array,
    w2: jax.Array,
    b1: jax.Array | None = None,
    b2: jax.Array | None = None,
    *,
    topk: int,
    logits: jax.Array | None = None,
    ids: jax.Array | None = None,
    router_bias: jax.Array | None = None,
    correction_bias: jax.Array | None = None,
    padding_mask: jax.Array | None = None,
    token_count: jax.Array | int | None = None,
    global_counts: jax.Array | None = None,
    shared_w1: jax.Array | None = None,
    shared_w2: jax.Array | None = None,
    shared_gate: jax.Array | None = None,
    latent_down: jax.Array | None = None,
    latent_up: jax.Array | None = None,
    **options: Unpack[MoeOptions],
) -> tuple[jax.Array, Aux]:
    """A whole Mixture-of-Experts layer: router, experts, shared expert, latent projections.

    x [T,H]; router_weight [E,H] of x's type or float32, or None where ready logits [T,E] are given,
    of float32, bfloat16 or float16; ids [T,k] integers to use in place of the router's choice, as
    for ``experts``, their weights still come from the scores; router_bias, correction_bias [E]
    floats, used in float32; padding_mask [T]: a token where it is not 0 takes no part, nor does one
    from ``token_count`` on. global_counts, for ``balance="global"``: the counts so far, zeros at
    first, [E+1,2] int32 (low and high word) or [E+1] int64. w1, w2, b1, b2 as in ``experts``, with
    L for H if latent_down [L,H] and latent_up [H,L] are given. shared_w1 [V,H] and shared_w2 [H,S],
    V = 2S for gated activations, else S; shared_gate [H]. ``transposed`` turns all matrices but the
    router's. Options: ``MoeOptions``.

    Returns out [T,H], differentiable in all floats but correction_bias, and ``Aux``, whose two
    losses are to be added to the training loss. Raises as ``experts`` does.
    """
    x = jnp.asarray(x)
    known = _known(options, MoeOptions)
    along = 0 if known.get("transposed") else 1
    config = _config(
        x,
        w2,
        known,
        topk=topk,
        shared_inter=0 if shared_w2 is None else jnp.shape(shared_w2)[along],
        latent=0 if latent_up is None else jnp.shape(latent_up)[along],
        **_score_fields(x, router_weight, logits),
    )
    arrays = _parameters(
        config,
        x,
        {
            "w1": w1,
            "w2": w2,
            "b1": b1,
            "b2": b2,
            "shared_w1": shared_w1,
            "shared_w2": shared_w2,
            "shared_gate": shared_gate,
            "latent_down": latent_down,
            "latent_up": latent_up,
        },
    )
    if topk > config.experts:
        raise ArgumentError(
            f"moeblas.jax: topk = {topk}, wanted at most the {config.experts} experts"
        )
    router = {"router_weight": router_weight, "logits": logits, "given_ids": ids}
    router |= {"router_bias": router_bias, "correction_bias": correction_bias}
    arrays |= _router(config, x, router)
    arrays |= _bookkeeping(config, x.shape[0], padding_mask, token_count, global_counts)
    found = run_layer(bytes(config), {"x": x, **arrays})
    counts = found.get("global_counts")
    if counts is not None and jnp.asarray(global_counts).dtype == jnp.int64:
        counts = jax.lax.bitcast_convert_type(counts, jnp.int64)
    weights = jax.lax.stop_gradient(found["topk_weights"])
    return found["out"], Aux(found["topk_ids"], weights, found["counts"], *found["losses"], counts)
