# SPDX-License-Identifier: Apache-2.0
"""The training loop: eager, compiled layer by layer, or one CUDA graph an iteration.

Idea: an iteration is forward, backward, clipping, AdamW, and never waits for the device; losses
stay there until the end and times come from events. Invariant: step i sees the same batch and the
same learning rate in every mode; the graph is captured after WARMUP ordinary steps, which count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .data import Batches

WARMUP = 5  # steps before the capture, and those that timing leaves out


def median_step_ms(times_ms: list[float]) -> float:
    """The median step, without the first WARMUP + 1 (tuning, compiling, capturing)."""
    return statistics.median(times_ms[WARMUP + 1 :] or times_ms)


@dataclass
class Record:
    """What a run measured: a loss and a time in ms for each step, the peak of memory in bytes."""

    losses: list[float]
    times_ms: list[float]
    peak_bytes: int


class Trainer:
    """One iteration of a model with AdamW (fused), the gradient clipped to norm 1."""

    def __init__(self, model: PreTrainedModel, rate: float, warmup: int, capturable: bool) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._rate, self._warmup = rate, warmup
        self._lr = torch.zeros((), device=self._device)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
            capturable=capturable,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr

    def set_rate(self, step: int) -> None:
        """Linear warm-up, then constant; written into the tensor that the optimizer reads."""
        self._lr.fill_(self._rate * min(1.0, (step + 1) / self._warmup))

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of ``batch`` [batch, sequence]; leaves the gradients in the parameters."""
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Clips, steps and drops the gradients."""
        with torch.profiler.record_function("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.forward_backward(batch)
        self.update()
        return loss


class Graph:
    """A captured iteration of ``trainer``; calling it copies the batch in and replays."""

    def __init__(self, trainer: Trainer, batch: torch.Tensor) -> None:
        self._batch = batch.clone()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._loss = trainer(self._batch)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self._batch.copy_(batch)
        self._graph.replay()
        return self._loss


class _Clock:
    """The time between marks, in ms: by events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[object] = []
        self.mark()

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in pairs]


def train(
    trainer: Trainer,
    batches: Batches,
    steps: int,
    graph: bool,
    report: Callable[[int, float], None],
) -> Record:
    """Runs ``steps`` steps. ``report(step, loss)`` is called every 50, and waits for the device."""
    device = next(trainer.model.parameters()).device
    # A capture wants the steps before it on a stream that is not the default one.
    stream = torch.cuda.Stream() if graph else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        losses = torch.zeros(steps, device=device)
        clock, run = _Clock(device), trainer
        for step in range(steps):
            trainer.set_rate(step)
            batch = batches[step]
            if graph and step == WARMUP:
                run = Graph(trainer, batch)
            losses[step] = run(batch)
            clock.mark()
            if step % 50 == 49:
                report(step, losses[step].item())
        values, times = losses.tolist(), clock.intervals()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Record(values, times, peak)
