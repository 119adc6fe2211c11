# SPDX-License-Identifier: Apache-2.0
"""The structs and enumerations of moeblas.h, field by field in the same order.

The names follow from the C ones: ``moe_forward_args`` is ``ForwardArgs``, ``MOE_SCORE_SIGMOID`` is
``Score.SIGMOID``. Invariant: sizes, offsets and values are those of the header;
tests/python/test_mirror.py asks the compiler.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_size_t, c_void_p, sizeof
from enum import IntEnum

MAX_EXPERTS = 4096
MAX_TOPK = 64
VERSION = (0, 1, 0)


class Status(IntEnum):
    OK = 0
    ERROR_ARGUMENT = 10
    ERROR_UNSUPPORTED = 20
    ERROR_WORKSPACE = 30
    ERROR_MEMORY = 40
    ERROR_DEVICE = 50
    ERROR_INTERNAL = 60


class Backend(IntEnum):
    AUTO = 0
    CPU = 1
    CUDA = 2


class Dtype(IntEnum):
    DEFAULT = 0
    FP32 = 1
    BF16 = 2
    FP16 = 3


class Activation(IntEnum):
    SILU = 0
    GELU = 1
    GELU_TANH = 2
    QUICK_GELU = 3
    RELU = 4
    RELU2 = 5
    RELU2_TANH = 6
    SITU = 7


class Layout(IntEnum):
    CONCAT_GATE_FIRST = 0
    CONCAT_UP_FIRST = 1
    INTERLEAVED = 2


class Score(IntEnum):
    SOFTMAX = 0
    TOPK_SOFTMAX = 1
    SIGMOID = 2
    SQRT_SOFTPLUS = 3


class GroupScore(IntEnum):
    MAX = 0
    TOP2_SUM = 1
    TOPK_SUM = 2


class Balance(IntEnum):
    NONE = 0
    BATCH = 1
    SEQUENCE = 2
    GLOBAL = 3


class Drop(IntEnum):
    WEIGHT = 0
    POSITION = 1


class Entry(IntEnum):
    HIDDEN = 0
    LOGITS = 1
    IDS = 2
    ROWS = 3


class Recompute(IntEnum):
    NONE = 0
    H = 1


class Schedule(IntEnum):
    STATIC = 0
    DYNAMIC = 1


class Sized(Structure):
    """A struct that starts with its own size; an unknown field is an AttributeError."""

    __slots__ = ()

    def __init__(self, **fields: object) -> None:
        super().__init__(size=sizeof(self), **fields)


class ActDesc(Structure):
    __slots__ = ()
    _fields_ = [
        ("kind", c_int),
        ("gated", c_int),
        ("alpha", c_float),
        ("beta", c_float),
        ("gate_max", c_float),
        ("up_min", c_float),
        ("up_max", c_float),
        ("up_offset", c_float),
        ("up_beta", c_float),
        ("layout", c_int),
        ("interleave", c_int64),
    ]


class RouterDesc(Structure):
    __slots__ = ()
    _fields_ = [
        ("score", c_int),
        ("renormalize", c_int),
        ("renorm_epsilon", c_float),
        ("scale", c_float),
        ("groups", c_int64),
        ("topk_groups", c_int64),
        ("group_score", c_int),
        ("balance", c_int),
        ("balance_coeff", c_float),
        ("z_coeff", c_float),
        ("sequence_tokens", c_int64),
    ]


class Config(Sized):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("hidden", c_int64),
        ("inter", c_int64),
        ("experts", c_int64),
        ("topk", c_int64),
        ("dtype", c_int),
        ("logits_dtype", c_int),
        ("router_dtype", c_int),
        ("grad_dtype", c_int),
        ("entry", c_int),
        ("router", RouterDesc),
        ("act", ActDesc),
        ("weight_on_input", c_int),
        ("transposed", c_int),
        ("capacity_factor", c_float),
        ("drop", c_int),
        ("shared_inter", c_int64),
        ("latent", c_int64),
        ("recompute", c_int),
        ("sm_limit", c_int64),
        ("schedule", c_int),
    ]


class Params(Sized):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("router_weight", c_void_p),
        ("router_bias", c_void_p),
        ("correction_bias", c_void_p),
        ("w1", c_void_p),
        ("b1", c_void_p),
        ("w2", c_void_p),
        ("b2", c_void_p),
        ("shared_w1", c_void_p),
        ("shared_w2", c_void_p),
        ("shared_gate", c_void_p),
        ("latent_down", c_void_p),
        ("latent_up", c_void_p),
    ]


class ParamGrads(Sized):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("router_weight", c_void_p),
        ("router_bias", c_void_p),
        ("w1", c_void_p),
        ("b1", c_void_p),
        ("w2", c_void_p),
        ("b2", c_void_p),
        ("shared_w1", c_void_p),
        ("shared_w2", c_void_p),
        ("shared_gate", c_void_p),
        ("latent_down", c_void_p),
        ("latent_up", c_void_p),
    ]


class ForwardArgs(Sized):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("tokens", c_int64),
        ("x", c_void_p),
        ("params", POINTER(Params)),
        ("logits", c_void_p),
        ("given_ids", c_void_p),
        ("given_weights", c_void_p),
        ("row_offset", c_void_p),
        ("padding_mask", c_void_p),
        ("global_counts", c_void_p),
        ("out", c_void_p),
        ("topk_ids", c_void_p),
        ("topk_weights", c_void_p),
        ("counts", c_void_p),
        ("slot_row", c_void_p),
        ("losses", c_void_p),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("token_count", c_void_p),
    ]


class BackwardArgs(Sized):
    __slots__ = ()
    _fields_ = [
        ("size", c_size_t),
        ("tokens", c_int64),
        ("x", c_void_p),
        ("params", POINTER(Params)),
        ("logits", c_void_p),
        ("given_weights", c_void_p),
        ("row_offset", c_void_p),
        ("padding_mask", c_void_p),
        ("dout", c_void_p),
        ("loss_scale", c_float),
        ("skip_losses", c_int),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("dx", c_void_p),
        ("dlogits", c_void_p),
        ("dtopk_weights", c_void_p),
        ("grads", POINTER(ParamGrads)),
        ("accumulate", c_int),
        ("token_count", c_void_p),
        ("dlosses", c_void_p),
    ]


# Which enumeration a field holds, so that a configuration may name it: dtype="bf16".
ENUMS: dict[type[Structure], dict[str, type[IntEnum]]] = {
    ActDesc: {"kind": Activation, "layout": Layout},
    RouterDesc: {"score": Score, "group_score": GroupScore, "balance": Balance},
    Config: {
        "dtype": Dtype,
        "logits_dtype": Dtype,
        "router_dtype": Dtype,
        "grad_dtype": Dtype,
        "entry": Entry,
        "drop": Drop,
        "recompute": Recompute,
        "schedule": Schedule,
    },
}
