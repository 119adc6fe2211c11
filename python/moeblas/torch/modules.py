# SPDX-License-Identifier: Apache-2.0
"""The layer as modules: ``Experts`` (routing given) and ``MoE`` (with its router).

Parameters are plain, named and shaped as in moeblas.h, so that state_dict, FSDP, optimizers and
meta devices see nothing unusual. The options of a module are fixed when it is made, as one text.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import make_config
from .functional import Routing, call, cast_ids, options_text, routed


def _is_gated(options: dict) -> bool:
    return bool(make_config(act=options.get("act", "swiglu")).act.gated)


class _Layer(nn.Module):
    """What both modules share: making, initialising and naming parameters."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__()
        self._factory = {"dtype": dtype, "device": device}
        self._fan_in: dict[str, int] = {}

    def _parameter(
        self, name: str, fan_in: int, *shape: int, dtype: torch.dtype | None = None
    ) -> None:
        """Registers a parameter whose values will be uniform within 1 / sqrt(fan_in)."""
        made = torch.empty(*shape, **{**self._factory, **({"dtype": dtype} if dtype else {})})
        self.register_parameter(name, nn.Parameter(made))
        self._fan_in[name] = fan_in

    def _weights(self, prefix: str, inter: int, width: int, options: dict, *experts: int) -> None:
        """w1 and w2 of the routed experts, or of the shared one (no ``experts``)."""
        up = inter * (2 if _is_gated(options) else 1)
        turned = bool(options.get("transposed"))
        self._parameter(prefix + "w1", width, *experts, *((width, up) if turned else (up, width)))
        self._parameter(
            prefix + "w2", inter, *experts, *((inter, width) if turned else (width, inter))
        )

    def _biases(self, experts: int, inter: int, width: int, options: dict) -> None:
        self._parameter("b1", width, experts, inter * (2 if _is_gated(options) else 1))
        self._parameter("b2", inter, experts, width)

    def reset_parameters(self) -> None:
        """Every parameter uniform within 1 / sqrt(its inputs), as nn.Linear; buffers zero."""
        with torch.no_grad():
            for name, fan_in in self._fan_in.items():
                bound = 1 / math.sqrt(fan_in)
                nn.init.uniform_(getattr(self, name), -bound, bound)
            for buffer in self.buffers(recurse=False):
                buffer.zero_()

    def _tensors(self) -> dict[str, Tensor | None]:
        """Parameters and buffers by the names of moeblas.h."""
        named = {name: getattr(self, name) for name in self._fan_in}
        named.update((name, getattr(self, name)) for name in self._buffers)
        return named


class Experts(_Layer):
    """Experts whose routing comes from outside: forward(x, ids, weights), see
    ``moeblas.torch.experts``.

    Args:
        hidden, inter, experts: H, F and E.
        bias: whether b1 and b2 exist.
        dtype, device: of the parameters.
        options: see ``ExpertOptions``.
    """

    def __init__(
        self,
        hidden: int,
        inter: int,
        experts: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options,
    ) -> None:
        super().__init__(dtype, device)
        self.hidden, self.inter, self.experts, self.options = hidden, inter, experts, options
        self._text = options_text("ids", **options)
        self._weights("", inter, hidden, options, experts)
        if bias:
            self._biases(experts, inter, hidden, options)
        self.reset_parameters()

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """[..., H] from x [..., H], ids and weights [T, K]; a mask [T] may leave tokens out."""
        tensors = self._tensors()
        tensors["ids"], tensors["weights"] = cast_ids(ids), weights.to(torch.float32)
        tensors["padding_mask"] = padding_mask
        return call(self._text, x, tensors)[0]

    def extra_repr(self) -> str:
        """Sizes and options."""
        named = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"hidden={self.hidden}, inter={self.inter}, experts={self.experts}{named}"


class MoE(_Layer):
    """Router and experts, with all that may stand beside them: forward(x) -> (out, Routing), see
    ``moeblas.torch.moe``.

    Add ``routing.balance_loss`` and ``routing.z_loss`` to the loss of the model. With
    ``balance="global"`` the buffer ``global_counts`` is brought up to date by each call in training
    mode.

    Args:
        hidden, inter, experts, topk: H, F, E and K.
        bias: whether b1 and b2 exist.
        router_bias: whether the router has a bias (fp32).
        correction_bias: whether there is a buffer [E] (fp32) that only selects; see
            ``update_correction_bias``.
        shared_inter: inner width of the shared expert, 0 for none; shared_gate: whether it has a
            sigmoid gate.
        latent: width of the latent projections around the routed experts, 0 for none.
        router_dtype: of router_weight, if not dtype: torch.float32.
        dtype, device: of the parameters.
        options: see ``ExpertOptions`` and ``RouterOptions``.
    """

    def __init__(
        self,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        *,
        bias: bool = False,
        router_bias: bool = False,
        correction_bias: bool = False,
        shared_inter: int = 0,
        shared_gate: bool = False,
        latent: int = 0,
        router_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options,
    ) -> None:
        super().__init__(dtype, device)
        self.hidden, self.inter, self.experts, self.topk = hidden, inter, experts, topk
        self.shared_inter, self.latent, self.options = shared_inter, latent, options
        self._text = options_text("hidden", topk=topk, **options)
        self._parameter("router_weight", hidden, experts, hidden, dtype=router_dtype)
        if router_bias:
            self._parameter("router_bias", hidden, experts, dtype=torch.float32)
        self._weights("", inter, latent or hidden, options, experts)
        if bias:
            self._biases(experts, inter, latent or hidden, options)
        self._beside(shared_gate)
        self._state(correction_bias)
        self.reset_parameters()

    def _beside(self, shared_gate: bool) -> None:
        """The shared expert and the latent projections."""
        hidden, latent = self.hidden, self.latent
        if self.shared_inter:
            self._weights("shared_", self.shared_inter, hidden, self.options)
        if shared_gate:
            self._parameter("shared_gate", hidden, hidden)
        if latent:
            turned = bool(self.options.get("transposed"))
            down = (hidden, latent) if turned else (latent, hidden)
            self._parameter("latent_down", hidden, *down)
            self._parameter("latent_up", latent, *reversed(down))

    def _state(self, correction_bias: bool) -> None:
        device = self._factory["device"]
        if correction_bias:
            self.register_buffer("correction_bias", torch.zeros(self.experts, device=device))
        if self.options.get("balance") == "global":
            counts = torch.zeros(self.experts + 1, dtype=torch.int64, device=device)
            self.register_buffer("global_counts", counts)

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, ids: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """out [..., H] and the Routing; ``ids`` [T, K] are used instead of the router's choice."""
        tensors = self._tensors()
        tensors["padding_mask"], tensors["ids"] = padding_mask, ids
        out, routing = routed(self._text, x, self.router_weight, tensors)
        if routing.global_counts is not None and self.training:
            self.global_counts.copy_(routing.global_counts)
        return out, routing

    @torch.no_grad()
    def update_correction_bias(self, counts: Tensor, rate: float) -> None:
        """Balances without a loss (arXiv:2408.15664): by ``rate`` up for experts that ``counts``
        [E] has below the mean, down for those above."""
        counts = counts.to(torch.float32)
        self.correction_bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def extra_repr(self) -> str:
        """Sizes and options."""
        fields = ("hidden", "inter", "experts", "topk", "shared_inter", "latent")
        shown = [f"{name}={getattr(self, name)}" for name in fields if getattr(self, name)]
        return ", ".join(shown + [f"{name}={value}" for name, value in self.options.items()])
