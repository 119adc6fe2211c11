# SPDX-License-Identifier: Apache-2.0
"""examples/pretrain/attribution.py on traces made by hand and by chance; needs no GPU, no torch."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from pretrain import attribution  # noqa: E402
from pretrain.attribution import Host, Work, device_times, host_times, read_trace  # noqa: E402

RANGES = ("experts", "router", "attention", "optimizer")
MAIN, ENGINE = 11, 12  # the thread of the forward pass, and that of the backward pass


class Trace:
    """Builds a trace as the profiler writes it; correlations and ids of ops collide, as there."""

    def __init__(self) -> None:
        self.events: list[dict] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}]
        self._ops = self._launches = 0

    def _add(self, cat: str, name: str, where: tuple, span: tuple[float, float], **args) -> None:
        start, end = span
        event = {"ph": "X", "cat": cat, "name": name, "pid": where[0], "tid": where[1]}
        self.events.append({**event, "ts": start, "dur": end - start, "args": args})

    def host(self, name: str, start: float, end: float, thread: int = MAIN, **args: int) -> int:
        """An op, or a range if its name is one; returns its id."""
        self._ops += 1
        cat = "user_annotation" if name in RANGES or "#" in name else "cpu_op"
        args = {key.replace("_", " "): value for key, value in args.items()}
        self._add(cat, name, (1, thread), (start, end), **{"External id": self._ops}, **args)
        return self._ops

    def launch(
        self,
        at: float,
        start: float,
        end: float,
        *,
        thread: int = MAIN,
        stream: int = 7,
        cat: str = "kernel",
        recorded: bool = True,
        op: int = 0,
    ) -> None:
        """A launch at ``at`` and its work on a stream."""
        self._launches += 1
        ids = {"External id": op, "correlation": self._launches}
        if recorded:
            self._add("cuda_runtime", "cudaLaunchKernel", (1, thread), (at, at + 1), **ids)
        self._add(cat, cat, (0, stream), (start, end), **ids)

    def twin(self, name: str, op: int, start: float, end: float) -> None:
        """What the profiler draws on the device's time line for a range of the host."""
        self._add("gpu_user_annotation", name, (0, 7), (start, end), **{"External id": op})

    def times(self) -> tuple[dict[str | None, float], float]:
        return device_times(*read_trace({"traceEvents": self.events}), RANGES)


def step() -> Trace:
    """A step: forward in two ranges, backward on the engine's thread, an optimizer with a range of
    torch's own in it, two streams that overlap, twins of everything."""
    t = Trace()
    attention = t.host("attention", 0, 20)
    t.host("aten::mm", 2, 8, Sequence_number=5)
    t.launch(3, 100, 110)
    experts = t.host("experts", 30, 60)
    t.host("_Forward", 32, 58, Sequence_number=6)
    t.host("moeblas::forward", 34, 50)
    t.launch(35, 110, 150)
    t.launch(36, 140, 160, stream=9)  # 10 us at the same time as the one before
    t.host("router", 51, 57)
    t.launch(52, 160, 165, cat="gpu_memset")  # launched by the innermost range
    t.host("aten::loss", 62, 68, Sequence_number=7)
    t.launch(63, 170, 172)
    for number, start, took in ((7, 70, 3), (6, 80, 80), (5, 90, 20)):
        node = {"Fwd_thread_id": 1, "Sequence_number": number, "thread": ENGINE}
        t.host("autograd::engine::evaluate_function: Node", start, start + 9, **node)
        t.host("Node", start + 1, start + 8, **node)
        t.host("aten::mm", start + 2, start + 7, thread=ENGINE)
        t.launch(start + 3, 1000 + 10 * start, 1000 + 10 * start + took, thread=ENGINE)
    optimizer = t.host("optimizer", 200, 300)
    t.host("aten::norm", 201, 209)
    t.launch(202, 3000, 3007)
    adamw = t.host("Optimizer.step#AdamW.step", 210, 280)
    t.host("aten::_fused_adamw_", 220, 270)
    for chunk in range(4):
        t.launch(230 + 2 * chunk, 3010 + 10 * chunk, 3020 + 10 * chunk)
    t.launch(290, 3100, 3101, cat="gpu_memcpy")  # straight from the range, in no op
    t.twin("attention", attention, 100, 110)
    t.twin("experts", experts, 110, 160)
    t.twin("optimizer", optimizer, 3000, 3900)
    t.twin("Optimizer.step#AdamW.step", adamw, 3010, 3800)
    return t


WANTED = {
    "attention": 10 + 20,
    "experts": 50 + 80,
    "router": 5,
    "optimizer": 7 + 40 + 1,
    None: 2 + 3,
}


def test_a_step() -> None:
    assert step().times() == (WANTED, 0.0)


@pytest.mark.parametrize("planted", ["twins", "overlaps"])
def test_notices_double_counting(monkeypatch, planted: str) -> None:
    """What test_a_step compares would be another were a twin work, or an overlap counted twice."""
    if planted == "twins":
        device = {*attribution.DEVICE, "gpu_user_annotation"}
        monkeypatch.setattr(attribution, "DEVICE", device)
        assert step().times()[0]["optimizer"] > WANTED["optimizer"]
        return
    hosts, works = read_trace({"traceEvents": step().events})
    alone = [device_times(hosts, [work], RANGES)[0] for work in works]
    assert sum(times.get("experts", 0.0) for times in alone) == WANTED["experts"] + 10


def test_launch_that_was_not_recorded() -> None:
    """The op that the profiler names stands in for it; without one the work is unknown."""
    t = Trace()
    t.host("experts", 0, 10)
    op = t.host("moeblas::forward", 1, 9)
    t.launch(2, 20, 25, recorded=False, op=op)
    t.launch(3, 30, 37, recorded=False, op=99)
    assert t.times() == ({"experts": 5.0}, 7.0)


def test_events_without_an_id() -> None:
    """An op that has no id does not stand in for a launch whose op is 0, which is none."""
    t = Trace()
    t._add("user_annotation", "experts", (1, MAIN), (0, 10))
    t.launch(2, 20, 25, recorded=False)
    assert t.times() == ({}, 5.0)


def test_sequence_numbers_of_other_ops() -> None:
    """The op that made a node is the last with its number; ops in the backward pass make none."""
    t = Trace()
    t.host("router", 0, 10)
    t.host("aten::detach", 1, 2, Sequence_number=3)  # makes no node, and shows the next number
    t.host("experts", 20, 30)
    t.host("aten::mm", 21, 29, Sequence_number=3)
    t.host("Node", 40, 50, ENGINE, Sequence_number=3, Fwd_thread_id=1)
    t.host("aten::mm", 41, 49, ENGINE, Sequence_number=3)
    t.launch(42, 60, 64, thread=ENGINE)
    t.host("AccumulateGrad", 50, 60, ENGINE, Sequence_number=-1, Fwd_thread_id=1)
    t.launch(51, 70, 71, thread=ENGINE)
    assert t.times() == ({"experts": 4.0, None: 1.0}, 0.0)


def test_host_times() -> None:
    hosts = [
        Host("aten::embedding", MAIN, 0, 10),
        Host("attention", MAIN, 10, 50),
        Host("aten::mm", MAIN, 20, 40),
        Host("router", MAIN, 25, 30),
        Host("attention", ENGINE, 20, 40),  # at the same time, on another thread
        Host("aten::mm", MAIN, 60, 70),  # begins with the range around it
        Host("experts", MAIN, 60, 80),
    ]
    wanted = {None: 10.0, "attention": 35.0 + 20.0, "router": 5.0, "experts": 20.0}
    assert host_times(hosts, RANGES) == wanted


def chance(rng: random.Random) -> tuple[list[Host], list[Work]]:
    """Ranges and ops that nest by halving, works that overlap as they like; whole us."""
    hosts: list[Host] = []

    def fill(thread: int, start: int, end: int) -> None:
        hosts.append(Host(rng.choice([*RANGES, "aten::mm"]), thread, start, end))
        middle = rng.randint(start + 1, end - 1)
        for a, b in ((start, middle), (middle, end)):
            if b - a > 3 and rng.random() < 0.8:
                fill(thread, a + 1, b)

    for thread in (MAIN, ENGINE):
        fill(thread, 0, 60)
    starts = [rng.randrange(300) for _ in range(40)]
    works = [
        Work("kernel", start, start + rng.randrange(20), rng.randrange(len(hosts)))
        for start in starts
    ]
    return hosts, works


@pytest.mark.parametrize("seed", range(50))
def test_every_microsecond_is_counted_once(seed: int) -> None:
    """Against marking single microseconds, and the innermost range by looking at all of them."""
    hosts, works = chance(random.Random(seed))

    def owner(host: Host) -> str | None:
        around = [
            h
            for h in hosts
            if h.name in RANGES
            and h.thread == host.thread
            and h.start <= host.start
            and host.end <= h.end
        ]
        return min(around, key=lambda h: h.end - h.start).name if around else None

    taken: dict[int, str | None] = {}
    for work in sorted(works, key=lambda work: work.start):
        for us in range(work.start, work.end):
            taken.setdefault(us, owner(hosts[work.launch]))
    wanted: dict[str | None, float] = defaultdict(float)
    for kind in taken.values():
        wanted[kind] += 1
    times, unknown = device_times(hosts, works, RANGES)
    assert {kind: us for kind, us in times.items() if us} == wanted and unknown == 0
    assert sum(times.values()) == len(taken)
