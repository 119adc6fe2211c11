# SPDX-License-Identifier: Apache-2.0
"""moeblas in PyTorch: the layer as functions, modules and operators ``torch.ops.moeblas.*``."""

from .functional import ExpertOptions, RouterOptions, Routing, experts, moe, rows
from .modules import Experts, MoE

__all__ = [
    "ExpertOptions",
    "Experts",
    "MoE",
    "RouterOptions",
    "Routing",
    "experts",
    "moe",
    "rows",
]
