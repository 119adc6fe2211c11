# SPDX-License-Identifier: Apache-2.0
"""moeblas: fused Mixture-of-Experts layers, forward and backward.

This module needs nothing but the library itself. The layer on arrays is in ``moeblas.numpy``,
``moeblas.torch`` and ``moeblas.jax``, ``moeblas.hf`` puts it into Transformers models; each is
imported by name, when it is wanted.
"""

from ._lib import (
    ArgumentError,
    Context,
    DeviceError,
    Error,
    InternalError,
    OutOfMemoryError,
    Plan,
    UnsupportedError,
    WorkspaceError,
    backend_available,
    dtype_bytes,
    library_path,
    make_config,
    version,
)
from ._structs import (
    Activation,
    Backend,
    Balance,
    Config,
    Drop,
    Dtype,
    Entry,
    GroupScore,
    Layout,
    ParamGrads,
    Params,
    Recompute,
    Schedule,
    Score,
    Status,
)

__version__ = version()
__all__ = [
    "Activation",
    "ArgumentError",
    "Backend",
    "Balance",
    "Config",
    "Context",
    "DeviceError",
    "Drop",
    "Dtype",
    "Entry",
    "Error",
    "GroupScore",
    "InternalError",
    "Layout",
    "OutOfMemoryError",
    "ParamGrads",
    "Params",
    "Plan",
    "Recompute",
    "Schedule",
    "Score",
    "Status",
    "UnsupportedError",
    "WorkspaceError",
    "backend_available",
    "dtype_bytes",
    "library_path",
    "make_config",
    "version",
]
