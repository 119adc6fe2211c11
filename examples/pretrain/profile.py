# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, by torch.profiler: experts, router, attention, optimizer, rest, gaps.

Idea: forward hooks open a named range around the modules of a kind. A forward op belongs to the
innermost range around it; a backward op to the range of the forward op that made its autograd node,
which the profiler links by a sequence number. Device time without a kernel is a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from .data import Batches
from .loop import Trainer
from .models import experts_of

KINDS = ("experts", "router", "attention", "optimizer", "rest", "gaps")


def _kind_of(name: str, module: nn.Module, experts: set[int]) -> str | None:
    if id(module) in experts:
        return "experts"
    leaf = name.rpartition(".")[2]
    if leaf == "self_attn":
        return "attention"
    is_router = leaf in ("gate", "router") and hasattr(module, "top_k")
    return "router" if is_router else None


def add_ranges(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Opens a range around every module of a kind; the handles remove them."""
    experts = {id(module) for module in experts_of(model)}
    handles = []
    for name, module in model.named_modules():
        kind = _kind_of(name, module, experts)
        if kind is None:
            continue
        open_range = record_function(kind)
        handles.append(
            module.register_forward_pre_hook(lambda *_, r=open_range: r.__enter__() and None)
        )
        handles.append(
            module.register_forward_hook(lambda *_, r=open_range: r.__exit__(None, None, None))
        )
    return handles


def _range_around(event: FunctionEvent | None) -> str | None:
    while event is not None:
        if event.name in KINDS:
            return event.name
        event = event.cpu_parent
    return None


def _is_backward(event: FunctionEvent) -> bool:
    return event.scope == 1 or event.name.startswith("autograd::engine::")  # 1: BACKWARD_FUNCTION


def _sequence_around(event: FunctionEvent | None) -> int:
    """The number of the autograd node that runs ``event``; -1 outside a backward pass."""
    while event is not None:
        if _is_backward(event) and event.sequence_nr >= 0:
            return event.sequence_nr
        event = event.cpu_parent
    return -1


def _own_time_us(event: FunctionEvent, cuda: bool) -> float:
    if cuda:  # a range has a twin of its own name on the device, which is no kernel
        return sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)
    return event.self_cpu_time_total


def attribute(events: Iterable[FunctionEvent]) -> list[tuple[FunctionEvent, str]]:
    """Every event of the host with the kind (all but gaps) that it belongs to."""
    hosts = [event for event in events if event.device_type == DeviceType.CPU]
    hosts.sort(key=lambda event: event.time_range.start)
    # The last op to bear a number is the one that made the node: making it raises the counter.
    made_in = {e.sequence_nr: _range_around(e) for e in hosts if not _is_backward(e)}
    made_in[-1] = None
    return [
        (event, _range_around(event) or made_in.get(_sequence_around(event)) or "rest")
        for event in hosts
    ]


def _totals_us(events: Iterable[FunctionEvent], cuda: bool) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for event, kind in attribute(events):
        total[kind] += _own_time_us(event, cuda)
    return total


def _busy_us(events: Iterable[FunctionEvent]) -> float:
    """The time in which the device ran at least one kernel."""
    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    named = {e.name for e in events if e.device_type == DeviceType.CPU}  # ranges, not kernels
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_device if e.name not in named)
    busy, end = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def profile(trainer: Trainer, batches: Batches, first: int, steps: int, step_ms: float) -> str:
    """Profiles ``steps`` more steps and returns the shares of a step as text.

    step_ms: the time of a step without the profiler, from which the gaps are counted on a GPU.
    """
    cuda = next(trainer.model.parameters()).is_cuda
    handles = add_ranges(trainer.model)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(activities=activities) as profiler:
        for step in range(first, first + steps):
            trainer(batches[step])
        if cuda:
            torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    events = profiler.events()
    kinds = {kind: us / steps / 1e3 for kind, us in _totals_us(events, cuda).items()}
    whole = step_ms if cuda else sum(kinds.values())
    if cuda:
        kinds["gaps"] = max(0.0, step_ms - _busy_us(events) / steps / 1e3)
    rows = [
        f"  {k:<10} {kinds.get(k, 0.0):9.2f} ms {100 * kinds.get(k, 0.0) / whole:5.1f} %"
        for k in KINDS
    ]
    return "\n".join([f"profile of {steps} steps, a step is {whole:.2f} ms", *rows])
