# SPDX-License-Identifier: Apache-2.0
"""Timing for the peers, by the method of `moeblas bench` (docs/measuring.md): medians of CUDA
events, a cold L2, memory counted beyond the inputs, the ceilings of the device before and after,
and rows with the columns of bench/results/.
"""

from __future__ import annotations

import csv
import datetime
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

import torch

COLUMNS = (
    "date,commit,problem,pass,impl,time_us,tflops,gbps,pct_of_floor,launches,peak_mib,"
    "spread_pct,note"
).split(",")
FLUSH_BYTES = 1 << 28  # several times the L2


def nothing() -> None:
    """Stands for a preparation that there is none of."""


@dataclass
class Clock:
    """Times calls: up to `repeat` within `seconds`, at least three, after two not counted."""

    device: str
    seconds: float
    repeat: int = 20

    def __post_init__(self) -> None:
        self.cuda = self.device == "cuda"
        self.flush = torch.empty(
            FLUSH_BYTES if self.cuda else 0, dtype=torch.uint8, device=self.device
        )

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, call: Callable[[], object]) -> float:
        """Microseconds of one call."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def measure(
        self, call: Callable[[], object], before: Callable[[], object] = nothing
    ) -> tuple[float, float]:
        """(median in microseconds, spread between the quartiles in per cent of it).

        `before` runs untimed ahead of each call.
        """
        times: list[float] = []
        for _ in range(2):
            before()
            call()
        self.wait()
        end = time.monotonic() + self.seconds
        while len(times) < self.repeat and (len(times) < 3 or time.monotonic() < end):
            before()
            times.append(self.once(call))
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4)
        return median, 100 * (quartiles[2] - quartiles[0]) / median

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        """Memory that `call` takes at most, beyond what was taken before; None on the CPU."""
        if not self.cuda:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        call()
        self.wait()
        return (torch.cuda.max_memory_allocated() - base) / 2**20

    def ceilings(self) -> tuple[float, float]:
        """(operations a second of a dense product, bytes a second read and written by a copy).

        cuBLAS bf16 8192^3 and 2 GiB on CUDA, torch's own fp32 on the CPU.
        """
        side, count = (8192, 1 << 29) if self.cuda else (1024, 1 << 24)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        a, b = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
        flops = 2 * side**3 / self.measure(lambda: a @ b.T)[0] * 1e6
        source = torch.rand(count, device=self.device)
        target = torch.empty_like(source)
        rate = 2 * 4 * count / self.measure(lambda: target.copy_(source))[0] * 1e6
        return flops, rate


class Table:
    """Rows of CSV, each flushed at once, so that a run cut short leaves what it measured."""

    def __init__(self, file: TextIO) -> None:
        self.writer = csv.writer(file, lineterminator="\n")
        self.file = file
        self.date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        git = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        self.commit = git.stdout.strip() or "unknown"
        self.flops = self.rate = 0.0
        self.writer.writerow(COLUMNS)

    def row(
        self, problem: str, passes: str, impl: str, note: str = "", **values: float | None
    ) -> None:
        """One row; `values` by column name, None is empty. Commas of the note become semicolons."""
        cells = {
            "date": self.date,
            "commit": self.commit,
            "problem": problem,
            "pass": passes,
            "impl": impl,
            "note": " ".join(note.replace(",", ";").split())[:300],
        }
        cells |= {name: f"{value:.3f}" for name, value in values.items() if value is not None}
        self.writer.writerow([cells.get(column, "") for column in COLUMNS])
        self.file.flush()

    def ceilings(self, clock: Clock, when: str) -> None:
        """Measures the ceilings; those `before` are what floors are reckoned from."""
        flops, rate = clock.ceilings()
        if when == "before":
            self.flops, self.rate = flops, rate
        dense = "cuBLAS bf16 8192^3" if clock.cuda else "torch fp32 1024^3"
        self.row("ceiling", "", dense, when, tflops=flops * 1e-12)
        self.row("ceiling", "", "torch copy", when, gbps=rate * 1e-9)

    def timed(
        self,
        problem: str,
        passes: str,
        impl: str,
        time_us: float,
        spread: float,
        flops: float,
        count: float,
        peak_mib: float | None = None,
        note: str = "",
    ) -> None:
        """A row of something that was timed: `flops` operations, `count` bytes that must move."""
        compute, memory = flops / self.flops * 1e6, count / self.rate * 1e6
        floor = "compute" if compute > memory else "memory"
        text = f"{floor} floor; pct_of_dense {100 * compute / time_us:.1f}" + (
            f"; {note}" if note else ""
        )
        self.row(
            problem,
            passes,
            impl,
            text,
            time_us=time_us,
            tflops=flops / time_us * 1e-6,
            gbps=count / time_us * 1e-3,
            pct_of_floor=100 * max(compute, memory) / time_us,
            peak_mib=peak_mib,
            spread_pct=spread,
        )
