# SPDX-License-Identifier: Apache-2.0
"""Times the peers on problem strings:

    python3 bench/peers/run.py --csv OUT --seconds 1 @tests/problems/bench_cuda.txt

Every peer is first held against an fp32 reference, on the very data it is timed on. A peer that
is not installed, is wrong, fails, or does not get its turn within the budget leaves a row that
says so. Exit status: 0, or 1 if a peer failed or was wrong, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

import torch

import case as cases
from peer import Absent, Peer
from peer_deepgemm import LIMIT, DeepGEMM
from peer_sonic import Sonic
from peer_torch import Grouped, Transformers
from peer_triton import Liger, ScatterMoE
from timing import Clock, Table

PEERS: tuple[Peer | DeepGEMM, ...] = (
    Grouped(False, True),
    Grouped(False, False),
    Grouped(True, True),
    Grouped(True, False),
    ScatterMoE(),
    Liger(),
    Sonic(),
    DeepGEMM(),
    Transformers(),
)
NAMES = [peer.name for peer in PEERS]


class Wrong(Exception):
    """A peer's results are not those of the reference."""


class OutOfTime(Exception):
    """--limit is over."""


def out_of_time(number: int, frame: FrameType | None) -> None:
    """Signal handler of --limit; tuning loops are in Python, so they end here."""
    raise OutOfTime


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="+", help="problem strings, or @FILE with one a line")
    parser.add_argument(
        "--csv", type=argparse.FileType("w"), default=sys.stdout, help="where rows go (stdout)"
    )
    parser.add_argument("--seconds", type=float, default=1, help="of timing a pass, at most (1)")
    parser.add_argument(
        "--budget", type=float, default=280, help="seconds after which no peer is begun (280)"
    )
    parser.add_argument(
        "--limit", type=int, default=100, help="seconds for one peer on one problem (100)"
    )
    parser.add_argument("--only", default="", help="problems whose text or comment has this in it")
    parser.add_argument("--peers", default=",".join(NAMES), help="of " + ",".join(NAMES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def time_layer(
    peer: Peer, case: cases.Case, wanted: dict[str, torch.Tensor], clock: Clock, table: Table
) -> None:
    """Verifies a peer, then writes its rows. Raises Wrong, or whatever the peer raises."""
    problem = case.problem
    p = case.p.to(peer.weight_dtype or problem.dtype)
    leaves = [
        v.detach().clone().requires_grad_(problem.backward)
        for v in (case.x, p, peer.arrange(case.w1), case.w2)
    ]
    function = peer.bind(case)
    state: dict[str, torch.Tensor] = {}

    def forward() -> None:
        state["out"] = function(*leaves)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(state.pop("out"), leaves, case.dout)

    if (
        problem.backward
    ):  # not compared: tuners run kernels that add to their results more than once
        forward()
        backward()
    forward()
    results = {"out": state["out"].detach()}
    if problem.backward:
        dx, dp, dw1, dw2 = backward()
        results |= {"dx": dx, "dp": dp, "dw1": peer.restore(dw1), "dw2": dw2}
        del dx, dp, dw1, dw2
    near, note = cases.compare(results, wanted, problem.dtype)
    if not near:
        raise Wrong(f"{note}, allowed {cases.LIMITS[problem.dtype]:.1e}")
    results.clear()
    state.clear()
    for passes, call, before in (("fwd", forward, state.clear), ("bwd", backward, forward)):
        if passes == "bwd" and not problem.backward:
            continue
        peak = clock.peak_mib((lambda: (forward(), backward())) if passes == "bwd" else forward)
        median, spread = clock.measure(call, before)
        table.timed(
            problem.text,
            passes,
            peer.name,
            median,
            spread,
            problem.flops(passes == "bwd"),
            problem.bytes(passes == "bwd", case.experts_in_use),
            peak,
            note,
        )


def time_products(peer: DeepGEMM, case: cases.Case, clock: Clock, table: Table) -> None:
    """DeepGEMM's rows."""
    for product in peer.products(case):
        if not product.off <= LIMIT:
            raise Wrong(f"wrong: {product.impl} is off by {product.off:.1e}")
        median, spread = clock.measure(product.call)
        table.timed(
            case.problem.text,
            product.passes,
            product.impl,
            median,
            spread,
            product.flops,
            product.bytes,
            note="the product alone; rows gathered and padded beforehand",
        )


class Driver:
    """Runs peers in turn and sees to it that each leaves rows."""

    def __init__(self, options: argparse.Namespace, clock: Clock, table: Table) -> None:
        self.options, self.clock, self.table = options, clock, table
        self.end = time.monotonic() + options.budget
        self.absent: dict[str, str] = {}
        self.opened: set[str] = set()
        self.failures = 0

    def say(self, problem: str, name: str, reason: str) -> None:
        """A row, and a line for people, instead of times."""
        self.table.row(problem, "", name, f"not run: {reason}")
        print(f"{problem}: {name}: {reason}", file=sys.stderr, flush=True)

    def attempt(self, name: str, case: cases.Case, wanted: dict[str, torch.Tensor]) -> None:
        """One peer on one problem. Raises whatever stops it."""
        peer = next(peer for peer in PEERS if peer.name == name)
        signal.alarm(self.options.limit)
        try:
            if name not in self.opened:
                peer.open(self.clock.device)
                self.opened.add(name)
            if isinstance(peer, DeepGEMM):
                time_products(peer, case, self.clock, self.table)
            else:
                time_layer(peer, case, wanted, self.clock, self.table)
        finally:
            signal.alarm(0)

    def peer(self, name: str, case: cases.Case, wanted: dict[str, torch.Tensor]) -> None:
        """One peer on one problem, whatever comes of it."""
        problem = case.problem.text
        if name in self.absent:
            self.table.row(problem, "", name, f"not run: {self.absent[name]}")
            return
        if time.monotonic() > self.end:
            self.say(problem, name, f"the budget of {self.options.budget:g} s was spent")
            return
        start = time.monotonic()
        try:
            self.attempt(name, case, wanted)
            print(
                f"{problem}: {name}: done in {time.monotonic() - start:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        except Absent as why:
            if name not in self.opened:
                self.absent[name] = str(why)
            self.say(problem, name, str(why))
        except Exception as why:  # a peer may fail in any way
            if (
                time.monotonic() - start >= self.options.limit
            ):  # compilers wrap the exception in their own
                self.say(problem, name, f"not done within {self.options.limit} s")
                return
            self.failures += 1
            self.say(problem, name, f"{type(why).__name__}: {str(why).partition(chr(10))[0]}")

    def problem(self, problem: cases.Problem) -> None:
        """All peers on one problem."""
        names = self.options.peers.split(",")
        torch._dynamo.reset()  # or its limit of recompilations would be met by the fourth shape
        case = cases.make(problem, self.clock.device)
        wanted = cases.reference(case)
        for name in names:
            self.peer(name, case, wanted)
            if self.clock.cuda:
                torch.cuda.empty_cache()


def chosen(options: argparse.Namespace) -> list[cases.Problem]:
    """The problems to run. Raises ValueError or OSError with a sentence for wrong usage."""
    unknown = [name for name in options.peers.split(",") if name not in NAMES]
    if unknown:
        raise ValueError(f"--peers {unknown}: wants {NAMES}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU")
    problems = [
        p for p in cases.read(options.problems) if options.only in p.text or options.only in p.name
    ]
    if not problems:
        raise ValueError(f"--only {options.only}: no problem has it in its text or comment")
    return problems


def main() -> int:
    """The command."""
    options = arguments()
    try:
        problems = chosen(options)
    except (ValueError, OSError) as why:
        print(f"run.py: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGALRM, out_of_time)
    clock, table = Clock(options.device, options.seconds), Table(options.csv)
    table.ceilings(clock, "before")
    driver = Driver(options, clock, table)
    for problem in problems:
        driver.problem(problem)
    table.ceilings(clock, "after")
    return 1 if driver.failures else 0


if __name__ == "__main__":
    sys.exit(main())
