# SPDX-License-Identifier: Apache-2.0
"""What a peer is: a name, how it is loaded, the layout it likes, its differentiable layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch

from case import Case

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Absent(Exception):
    """Why a peer cannot run here."""


def load(module: str) -> ModuleType:
    """Imports, or raises Absent with the reason."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as why:
        raise Absent(f"{module} cannot be imported: {why}") from why


class Peer:
    """A whole layer.

    Weights are in the peer's best layout before the clock starts; routing metadata and the
    combination are inside the function that `bind` makes.
    """

    name = ""
    weight_dtype: torch.dtype | None = None  # of p; None: that of x

    def open(self, device: str) -> None:
        """Loads what it needs. Raises Absent with the reason if that is not here."""

    def arrange(self, w1: torch.Tensor) -> torch.Tensor:
        """W1 [E,2F,H], gate rows first, in the peer's layout."""
        return w1

    def restore(self, dw1: torch.Tensor) -> torch.Tensor:
        """The gradient of W1 back in [E,2F,H], gate rows first."""
        return dw1

    def bind(self, case: Case) -> Forward:
        """The function (x, p, w1, w2) -> out for the ids of the case; Absent if there is none."""
        raise NotImplementedError


def wants_cuda(device: str) -> None:
    """For peers that are written for a GPU."""
    if device != "cuda":
        raise Absent(f"device {device}, wanted cuda")
