# SPDX-License-Identifier: Apache-2.0
"""Which part of a step every microsecond of a profiler's trace belongs to; needs no torch.

Idea: an event of the host belongs to the innermost named range around it on its thread. If there is
none and it runs in a backward node, it belongs to the range of the forward op that made the node,
which bears the same sequence number. Work of the device belongs to the host event that launched it.
Invariant: every instant of the device is counted once, whatever ranges nest and streams overlap, so
that the times add up to the time in which the device was busy. The profiler's own sums of a range
are not used: they mix in the range's twin on the device's time line, and what ops within it ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # a gpu_user_annotation is no work


class Host(NamedTuple):
    """An op, a named range or a launch on a thread of the host; times in us."""

    name: str
    thread: Hashable
    start: float
    end: float
    sequence: int = -1  # of the autograd node that it makes, or that it runs if ``backward``
    backward: bool = False


class Work(NamedTuple):
    """A kernel, copy or fill of the device; times in us."""

    name: str
    start: float
    end: float
    launch: int | None  # which host event launched it, None if the trace does not say


def read_trace(trace: Mapping[str, list[dict]]) -> tuple[list[Host], list[Work]]:
    """The events of a trace that ``torch.profiler.profile.export_chrome_trace`` wrote."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    hosts: list[Host] = []
    launches: dict[int, int] = {}
    ops: dict[int, int] = {}
    for event in events:
        if event.get("cat") not in HOST:
            continue
        args = event.get("args", {})
        if "correlation" in args:
            launches[args["correlation"]] = len(hosts)
        elif "External id" in args:
            ops[args["External id"]] = len(hosts)
        hosts.append(_host(event, args))
    works = []
    for event in events:
        if event.get("cat") in DEVICE:
            args = event.get("args", {})
            launch = launches.get(args.get("correlation"), ops.get(args.get("External id")))
            works.append(Work(event["name"], event["ts"], event["ts"] + event["dur"], launch))
    return hosts, works


def _host(event: dict, args: Mapping[str, int]) -> Host:
    name, start = event["name"], event["ts"]
    thread = (event["pid"], event["tid"])
    backward = args.get("Fwd thread id", 0) > 0 or name.startswith("autograd::engine::")
    sequence = args.get("Sequence number", -1)
    return Host(name, thread, start, start + event["dur"], sequence, backward)


def _nest(hosts: Sequence[Host]) -> tuple[list[int], dict[int, int]]:
    """The events from the outside in, and the innermost event around each that has one."""
    order = sorted(
        range(len(hosts)), key=lambda i: (hosts[i].thread, hosts[i].start, -hosts[i].end)
    )
    around: dict[int, int] = {}
    stack: list[int] = []
    for i in order:
        while stack and not _begins_in(hosts[i], hosts[stack[-1]]):
            stack.pop()
        if stack:
            around[i] = stack[-1]
        stack.append(i)
    return order, around


def _begins_in(inner: Host, outer: Host) -> bool:
    return inner.thread == outer.thread and inner.start < outer.end


def ranges_of(hosts: Sequence[Host], ranges: Collection[str]) -> list[str | None]:
    """Which of the named ``ranges`` each host event belongs to.

    The thread of the forward pass must be one: each thread counts its own sequence numbers.
    """
    order, around = _nest(hosts)
    named: dict[int, str] = {}
    node: dict[int, int] = {}  # the sequence number of the backward node that runs an event
    for i in order:
        outer = around.get(i)
        if hosts[i].name in ranges:
            named[i] = hosts[i].name
        elif outer in named:
            named[i] = named[outer]
        if hosts[i].backward:
            node[i] = hosts[i].sequence
        elif outer in node:
            node[i] = node[outer]
    # The last op to bear a number is the one that made the node: making it raises the counter.
    made = [i for i in order if i not in node and hosts[i].sequence >= 0]
    made_in = {hosts[i].sequence: named.get(i) for i in sorted(made, key=lambda i: hosts[i].start)}
    return [named.get(i) or made_in.get(node.get(i, -1)) for i in range(len(hosts))]


def host_times(hosts: Sequence[Host], ranges: Collection[str]) -> dict[str | None, float]:
    """The host's time in each range in us, None standing for outside of all."""
    _, around = _nest(hosts)
    times: dict[str | None, float] = defaultdict(float)
    owner = ranges_of(hosts, ranges)
    for i, host in enumerate(hosts):
        times[owner[i]] += host.end - host.start
        if i in around:
            times[owner[around[i]]] -= host.end - host.start
    return dict(times)


def device_times(
    hosts: Sequence[Host], works: Iterable[Work], ranges: Collection[str]
) -> tuple[dict[str | None, float], float]:
    """The device's time in each range in us, None standing for outside of all; then the time of
    work whose launch is unknown.

    Where works overlap, an instant is that of the one that began first. All add up to the time in
    which the device was busy.
    """
    owner = ranges_of(hosts, ranges)
    times: dict[str | None, float] = defaultdict(float)
    unknown, reached = 0.0, float("-inf")
    for work in sorted(works, key=lambda work: work.start):
        own = max(0.0, work.end - max(work.start, reached))
        reached = max(reached, work.end)
        if work.launch is None:
            unknown += own
        else:
            times[owner[work.launch]] += own
    return dict(times), unknown
