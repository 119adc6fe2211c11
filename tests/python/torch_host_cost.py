# SPDX-License-Identifier: Apache-2.0
"""Host time of the layer from PyTorch, and where it goes.

    python tests/python/torch_host_cost.py [cpu|cuda]

The layer is tiny, so that what is left is overhead. For a call without gradient, and for a step
(recorded call, backward by torch's engine, gradients of w1 and w2 added), in microseconds of CPU
time of this thread, the best of many short rounds:
    torch    operators with the same schemas that do nothing, in an autograd.Function for the step:
             what every operator written in Python costs
    library  moe_forward, and moe_backward, with arguments that are ready (on CUDA with launches)
    moeblas  the rest of the whole: what this package adds; aim 15 for a call
and of the call's ``moeblas``, each timed alone: ``entry``, from experts() to the operator;
``arguments``, their checks and addresses; ``outputs`` and ``workspace``, which torch allocates.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import moeblas.torch as mt
import torch
from moeblas._lib import lib
from moeblas._structs import ParamGrads
from moeblas.torch import ops

TOKENS, HIDDEN, INTER, COUNT, TOPK = 1, 8, 8, 4, 1
CALLS, ROUNDS = 60, 200


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


def make_nothing(device, grads):
    """Operators with the schemas of ours that do nothing, and a Function of them."""
    library = torch.library.Library("moeblas_nothing", "DEF")
    out = [torch.empty(TOKENS, HIDDEN, device=device), torch.empty(8, device=device)]
    for operator, results in ((ops.forward, out), (ops.backward, grads)):
        library.define(str(operator._schema).split("::", 1)[1])
        name = operator._schema.name.split("::")[1]
        library.impl(name, lambda *_, results=results: results, device.upper())
    forward = torch.ops.moeblas_nothing.forward.default
    backward = torch.ops.moeblas_nothing.backward.default

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, inputs_and_text, w1, w2):
            inputs, ctx.text = inputs_and_text
            with torch._C._AutoDispatchBelowAutograd():
                outputs = forward(x, *inputs, ctx.text, True)
            ctx.save_for_backward(x, w1, w2, outputs[-1])
            return outputs[0].view_as(x)

        @staticmethod
        def backward(ctx, dout):
            x, w1, w2, saved = ctx.saved_tensors
            kept = [{"w1": w1, "w2": w2}.get(name) for name in ops._KEPT]
            with torch._C._AutoDispatchBelowAutograd():
                return (None, None, *backward(dout, None, x, *kept, saved, ctx.text, [True] * 2))

    def below(*arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return forward(*arguments)

    return library, below, Nothing


def bare_calls(x, given, inputs, text):
    """moe_forward without and with what backward needs, and moe_backward, ready to run."""
    kept = [given.get(name) for name in ops._KEPT]
    forward, backward = ops._forward_call(x, inputs, text), ops._backward_call(x, kept, text)
    layer, tensors = forward.layer, [x.new_empty(x.shape), torch.randn_like(x)]
    for size in (layer.workspace(TOKENS), layer.saved_bytes(TOKENS)):
        tensors.append(x.new_empty(size, dtype=torch.uint8))
    tensors += [torch.empty_like(given[name]) for name in ("w1", "w2")]
    out, dout, workspace, saved, dw1, dw2 = [tensor.data_ptr() for tensor in tensors]
    for args in (forward.args, backward.args):
        args.workspace, args.workspace_bytes = workspace, tensors[2].numel()
        args.saved_bytes = tensors[3].numel()
    grads = ParamGrads(w1=dw1, w2=dw2)
    forward.args.out, backward.args.dout, backward.args.saved = out, dout, saved
    backward.args.grads.contents = grads
    backward.args.skip_losses = 1
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else None
    held = (forward, backward, tensors, grads)

    def run(train: bool) -> None:
        forward.args.saved = saved if train and held else None
        lib.moe_forward(layer.plan.handle, forward.args, stream)
        if train:
            lib.moe_backward(layer.plan.handle, backward.args, stream)

    return run


def show_parts(x, given, inputs, text, device) -> None:
    """Where the time of a call goes that is neither torch's dispatch nor the library's."""
    layer = ops._forward_call(x, inputs, text).layer
    size = layer.workspace(TOKENS)

    def operator():
        with torch._C._AutoDispatchBelowAutograd():
            return ops.forward(x, *inputs, text, False)

    parts = {
        "entry": mean_us(lambda: mt.experts(x, **given), device) - mean_us(operator, device),
        "arguments": mean_us(lambda: ops._forward_call(x, inputs, text), device),
        "outputs": mean_us(lambda: ops._empty_outputs(layer, x, None, False), device),
        "workspace": mean_us(lambda: x.new_empty(size, dtype=torch.uint8), device),
    }
    print("  ".join(f"{name} {us:.1f}" for name, us in parts.items()))


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
    dout, grads = torch.randn_like(x), [torch.zeros_like(given[name]) for name in ("w1", "w2")]
    _library, nothing, Nothing = make_nothing(device, grads)
    bare = bare_calls(x, given, inputs, text)
    print(f"device {device}, microseconds of host time")
    with torch.no_grad():
        show(
            "a call of moeblas.torch.experts",
            mean_us(lambda: nothing(x, *inputs, text, False), device),
            mean_us(lambda: bare(False), device),
            mean_us(lambda: mt.experts(x, **given), device),
        )
        show_parts(x, given, inputs, text, device)
    w1, w2 = given["w1"].requires_grad_(), given["w2"].requires_grad_()
    show(
        "a step: forward and backward",
        mean_us(lambda: Nothing.apply(x, (inputs, text), w1, w2).backward(dout), device),
        mean_us(lambda: bare(True), device),
        mean_us(lambda: mt.experts(x, **given).backward(dout), device),
    )


def show(what: str, by_torch: float, library: float, whole: float) -> None:
    """One line: the parts and the whole."""
    ours = whole - by_torch - library
    print(f"torch {by_torch:5.1f}  library {library:5.1f}  moeblas {ours:5.1f}", end="  ")
    print(f"whole {whole:5.1f}  {what}")


if __name__ == "__main__":
    main()
