# SPDX-License-Identifier: Apache-2.0
"""Host time of one call of the layer from PyTorch, and where it goes.

    python tests/python/torch_host_cost.py [cpu|cuda]

The layer is tiny, so that what is left is overhead. Four parts of a call without gradient are
measured, each as the best of several means of CPU time of this thread:
    dispatcher   an operator with the same schema and keys that does nothing
    library      the bare call of moe_forward (on CUDA with its launches)
    binding      the operator, less these two: Python and ctypes; the figure to keep under 15 us
    function     moeblas.torch.experts, less the operator
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import moeblas.torch as mt
import torch
from moeblas import _lib
from moeblas.torch import ops

TOKENS, HIDDEN, INTER, COUNT, TOPK = 1, 8, 8, 4, 1
CALLS, ROUNDS = 300, 15


def mean_us(call, device) -> float:
    """Microseconds of host time a call; the device is waited for between rounds only."""
    best = float("inf")
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time() - start) / CALLS * 1e6)
    return best


def make_nothing(schema: str, device: str):
    """An operator that takes the arguments of ``forward`` and does nothing with them."""
    library = torch.library.Library("moeblas_nothing", "DEF")
    library.define("forward" + schema)
    done = [torch.empty(1, device=device)]
    operator = torch.ops.moeblas_nothing.forward.default

    def autograd(*arguments):
        torch._C._any_requires_grad(*arguments[:-2])
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.impl("forward", lambda *_: done, device.upper())
    library.impl("forward", autograd, "Autograd")
    return library, operator


def bare_call(x, inputs, text):
    """moe_forward with arguments that are ready."""
    made = ops._Inputs(x, inputs)
    layer = made.layer(text)
    workspace = x.new_empty(layer.workspace(TOKENS), dtype=torch.uint8)
    out = torch.empty_like(x)
    fields = {**made.fields, "out": out.data_ptr(), "workspace": workspace.data_ptr()}
    fields["workspace_bytes"] = workspace.numel()
    arguments = _lib.ForwardArgs(params=ctypes.pointer(made.params), **fields)
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else None
    held = (made, workspace, out)
    return lambda: held and _lib.lib.moe_forward(layer.plan.handle, ctypes.byref(arguments), stream)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    x = torch.randn(TOKENS, HIDDEN, device=device)
    given = {
        "ids": torch.zeros(TOKENS, TOPK, dtype=torch.int32, device=device),
        "weights": torch.rand(TOKENS, TOPK, device=device),
        "w1": torch.randn(COUNT, 2 * INTER, HIDDEN, device=device),
        "w2": torch.randn(COUNT, HIDDEN, INTER, device=device),
    }
    text = mt.functional.options_text("ids")
    inputs = [given.get(name) for name in ops._INPUT_NAMES]
    operator = torch.ops.moeblas.forward.default
    _library, nothing = make_nothing(str(operator._schema).split("forward", 1)[1], device)
    dout = torch.randn_like(x)

    def step():
        mt.experts(x, **given).backward(dout)

    with torch.no_grad():
        dispatcher = mean_us(lambda: nothing(x, *inputs, text, False), device)
        library = mean_us(bare_call(x, inputs, text), device)
        whole = mean_us(lambda: operator(x, *inputs, text, False), device)
        function = mean_us(lambda: mt.experts(x, **given), device)
    for name in ("w1", "w2"):
        given[name].requires_grad_()
    recorded = mean_us(lambda: mt.experts(x, **given), device)
    print(f"device {device}, microseconds of host time a call")
    print(f"dispatcher {dispatcher:6.1f}")
    print(f"library    {library:6.1f}")
    print(f"binding    {whole - dispatcher - library:6.1f}")
    print(f"function   {function - whole:6.1f}")
    print(f"moeblas.torch.experts                      {function:6.1f}")
    print(f"... recorded for backward                  {recorded:6.1f}")
    print(f"... and backward, with torch's own engine  {mean_us(step, device):6.1f}")


if __name__ == "__main__":
    main()
