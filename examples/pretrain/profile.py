# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, by torch.profiler: experts, router, attention, optimizer, rest, gaps.

Idea: forward hooks open a named range around the modules of a kind, the profiler writes a trace,
and `attribution` counts every instant of it once. Device time without any work is a gap. Invariant:
the shares of a step on a GPU add up to it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from .attribution import Host, Work, device_times, host_times, read_trace
from .data import Batches
from .loop import Trainer
from .models import experts_of

RANGES = ("experts", "router", "attention", "optimizer")
KINDS = (*RANGES, "rest", "gaps")


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


def trace_of(profiler: torch.profiler.profile) -> tuple[list[Host], list[Work]]:
    """What a profiler that has ended recorded, of the host and of the device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(encoding="utf-8", errors="replace")))


def _record(trainer: Trainer, batches: Batches, steps: range) -> tuple[list[Host], list[Work]]:
    cuda = next(trainer.model.parameters()).is_cuda
    handles = add_ranges(trainer.model)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(activities=activities) as profiler:
        for step in steps:
            trainer(batches[step])
        if cuda:
            torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    return trace_of(profiler)


def profile(trainer: Trainer, batches: Batches, first: int, steps: int, step_ms: float) -> str:
    """Profiles ``steps`` more steps and returns the shares of a step as text.

    step_ms: the time of a step without the profiler, from which the gaps are counted on a GPU.
    Raises ValueError if the profiler saw nothing of the GPU.
    """
    hosts, works = _record(trainer, batches, range(first, first + steps))
    unknown, cuda = 0.0, next(trainer.model.parameters()).is_cuda
    if cuda and not works:
        raise ValueError("--profile: the profiler recorded no kernel, wanted those of the GPU")
    if cuda:
        times, unknown = device_times(hosts, works, RANGES)
    else:
        times = host_times(hosts, RANGES)
    kinds = {kind or "rest": us / steps / 1e3 for kind, us in times.items()}
    return table(kinds, unknown / steps / 1e3, step_ms if cuda else 0.0)


def table(kinds: dict[str, float], unknown_ms: float, step_ms: float) -> str:
    """The times of a step in ms as text: gaps are what is left of ``step_ms``.

    A step that was busy for longer than ``step_ms`` is as long as it was busy; ``unknown_ms`` is
    the time of work whose launch was not recorded, and gets a row if there is any.
    """
    rows = {kind: kinds.get(kind, 0.0) for kind in KINDS}
    if unknown_ms:
        rows["unknown"] = unknown_ms
    busy = sum(rows.values())
    whole = max(step_ms, busy)
    rows["gaps"] = whole - busy
    lines = [f"  {kind:<10} {ms:9.2f} ms {100 * ms / whole:5.1f} %" for kind, ms in rows.items()]
    return "\n".join([f"profile of a step of {whole:.2f} ms", *lines])
