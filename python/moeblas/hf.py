# SPDX-License-Identifier: Apache-2.0
"""moeblas as the experts of Hugging Face Transformers models.

    import moeblas.hf
    moeblas.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moeblas")

Idea: Transformers (5.x) calls ``fn(experts, hidden_states, ids, weights)`` for the implementation
registered under a name; the module says how its weights lie (``is_transposed``, ``has_bias``,
``has_gate``) and what its activation is (``act_fn``, ``_apply_gate``). ``describe`` turns that into
keywords of ``moeblas.torch.experts``. Attention, router and shared experts stay the model's.

Invariant: an activation is run only if it is known by the function that defines it. Anything else
is refused with the reason; nothing is guessed, and nothing falls back to another implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import activations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ._lib import ArgumentError, UnsupportedError
from .torch import experts

__all__ = ["describe", "experts_forward", "register"]

# `act_fn`, its class if it is a module -> its names without and with a gate (moeblas_act.def).
_ACTIVATIONS: dict[Callable, tuple[str, str]] = {
    nn.functional.silu: ("silu", "swiglu"),
    nn.SiLU: ("silu", "swiglu"),
    nn.ReLU: ("relu", "reglu"),
    activations.SiLUActivation: ("silu", "swiglu"),
    activations.GELUActivation: ("gelu", "geglu"),
    activations.GELUTanh: ("gelu_tanh", "geglu_tanh"),
    activations.NewGELUActivation: ("gelu_tanh", "geglu_tanh"),
    activations.FastGELUActivation: ("gelu_tanh", "geglu_tanh"),
    activations.AccurateGELUActivation: ("gelu_tanh", "geglu_tanh"),
    activations.QuickGELUActivation: ("quick_gelu", "quick_geglu"),
    activations.ReLUSquaredActivation: ("relu2", "reglu2"),
}


class _Gate(NamedTuple):
    """What a model's ``_apply_gate`` computes; ``limit`` and ``alpha`` name attributes."""

    limit: str = ""  # gate clamped to <= limit, up to [-limit, limit]
    alpha: str = ""  # gate * sigmoid(alpha * gate); "": act_fn, or plain SiLU if silu
    up_offset: float = 0.0
    silu: bool = False
    interleaved: bool = False


_DEFAULT_GATE = "transformers.integrations.moe._default_apply_gate"
_MODELS = "transformers.models."
_GATES: dict[str, _Gate] = {
    _DEFAULT_GATE: _Gate(),
    _MODELS + "gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": _Gate(
        "limit", "alpha", up_offset=1.0, interleaved=True
    ),
    _MODELS + "openai_privacy_filter.modeling_openai_privacy_filter."
    "OpenAIPrivacyFilterExperts._apply_gate": _Gate("limit", "alpha", up_offset=1.0),
    _MODELS + "minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": _Gate(
        "swiglu_limit", "swiglu_alpha", up_offset=1.0
    ),
    _MODELS + "deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": _Gate("limit"),
    _MODELS + "glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": _Gate(
        "swiglu_limit", silu=True
    ),
    _MODELS + "hy_v4.modeling_hy_v4.HYV4Experts._apply_gate": _Gate("swiglu_limit", silu=True),
}


def _activation(module: nn.Module) -> str:
    """The library's name of ``module.act_fn``, gated or not as the module is."""
    function = module.act_fn
    kind = type(function) if isinstance(function, nn.Module) else function
    names = _ACTIVATIONS.get(kind)
    if names is None:
        known = ", ".join(sorted({key.__name__ for key in _ACTIVATIONS}))
        raise UnsupportedError(
            f"hf: act_fn of {type(module).__name__} is {getattr(kind, '__name__', kind)}, "
            f"wanted one of {known}"
        )
    return names[1] if module.has_gate else names[0]


def _positive(module: nn.Module, name: str) -> float:
    """``module.<name>`` as a float; 0 would mean "no clamp" or "default" to the library."""
    value = getattr(module, name)
    if not isinstance(value, (int, float)) or not value > 0:
        raise UnsupportedError(f"hf: {name} of {type(module).__name__} is {value!r}, wanted > 0")
    return float(value)


@torch.compiler.assume_constant_result  # Dynamo cannot read the name of a function
def _gate_name(kind: type) -> str:
    function = kind._apply_gate
    return f"{function.__module__}.{function.__qualname__}"


def _gate_of(module: nn.Module) -> _Gate:
    name = _gate_name(type(module))
    if "_apply_gate" in module.__dict__ or name not in _GATES:
        raise UnsupportedError(
            f"hf: _apply_gate of {type(module).__name__} is {name}, which moeblas does not know; "
            "use another experts_implementation"
        )
    gate = _GATES[name]
    if gate.interleaved == bool(getattr(module, "is_concatenated", not gate.interleaved)):
        raise UnsupportedError(
            f"hf: is_concatenated of {type(module).__name__} is {module.is_concatenated}, "
            f"but its _apply_gate takes them {'in turn' if gate.interleaved else 'by halves'}"
        )
    return gate


def describe(module: nn.Module) -> dict[str, Any]:
    """The keywords of ``moeblas.torch.experts`` that compute what the experts module computes.

    module: an experts module of Transformers (a class under ``use_experts_implementation``).
    Raises UnsupportedError, with the reason, for an activation that is not known.
    """
    fields: dict[str, Any] = {"transposed": bool(module.is_transposed)}
    if not module.has_gate:
        return {**fields, "act": _activation(module)}
    gate = _gate_of(module)
    fields["layout"] = "interleaved" if gate.interleaved else "concat_gate_first"
    fields["act"] = "swiglu" if gate.silu or gate.alpha else _activation(module)
    if gate.alpha:
        fields["alpha"] = _positive(module, gate.alpha)
    if gate.limit:
        limit = _positive(module, gate.limit)
        fields.update(gate_max=limit, up_min=-limit, up_max=limit)
    if gate.up_offset:
        fields["up_offset"] = gate.up_offset
    return fields


def experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts of a Transformers model: [T,H], ids [T,k] and weights [T,k] give [T,H].

    Ids outside [0, experts) are skipped: under expert parallelism Transformers gives the slots of
    other ranks the id ``num_experts``. Differentiable in hidden states, weights and parameters.
    Raises UnsupportedError for an experts module that moeblas cannot run.
    """
    up = "gate_up_proj" if self.has_gate else "up_proj"
    w1, w2 = getattr(self, up), self.down_proj
    if w1.shape[0] != self.num_experts:
        raise ArgumentError(
            f"hf: {up} of {type(self).__name__} holds {w1.shape[0]} experts, "
            f"wanted {self.num_experts}"
        )
    b1 = getattr(self, up + "_bias") if self.has_bias else None
    b2 = self.down_proj_bias if self.has_bias else None
    return experts(hidden_states, top_k_index, top_k_weights, w1, w2, b1, b2, **describe(self))


def register(name: str = "moeblas") -> None:
    """Make ``name`` a valid ``experts_implementation`` of every Transformers model.

    Afterwards ``from_pretrained(..., experts_implementation=name)`` and
    ``model.set_experts_implementation(name)`` select it. Repeating the call changes nothing.
    """
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
