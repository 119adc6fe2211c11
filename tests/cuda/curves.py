#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Are two loss curves of `moeblas train` equal but for rounding? For tests/cuda/train_check.sh.

How far rounding alone takes two runs apart is measured, not assumed: `perturb` flips the last bit
of a random half of a checkpoint's parameters, and runs that go on from such checkpoints on one
back end show the noise. It grows as training amplifies it, with jumps where a token's choice of
an expert tips, so that one run may be some steps ahead of another. A curve passes while it stays
within FACTOR times the noise of up to LEAD steps later, relative to the loss. For bf16 the noise
is the distance that a run in bf16 on the CPU has from the one in fp32.
"""

import csv
import json
import random
import sys
from pathlib import Path

FACTOR = 4.0
LEAD = 10  # steps
OUTSIDE = 4  # exit status, unlike that of an exception
LEAST = 2.0**-20  # of the loss: a few units in the last place of the fp32 losses that are averaged


def perturb(folder: str, seed: str) -> None:
    """Flips the last bit of about half of the fp32 parameters in folder/checkpoint.safetensors."""
    path = Path(folder, "checkpoint.safetensors")
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    source = random.Random(int(seed))
    for name, tensor in json.loads(data[8:first]).items():
        if name == "__metadata__" or name == "correction_bias" or name.startswith("adam."):
            continue
        start, end = (first + offset for offset in tensor["data_offsets"])
        last_bits = int.from_bytes(b"\1\0\0\0" * ((end - start) // 4), "little")
        flips = source.getrandbits(8 * (end - start)) & last_bits
        data[start:end] = (int.from_bytes(data[start:end], "little") ^ flips).to_bytes(
            end - start, "little"
        )
    path.write_bytes(data)


def losses(folder: str) -> dict[int, float]:
    """The loss at each reported step of the run in `folder`."""
    with open(Path(folder, "log.csv"), newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def distances(reference: dict[int, float], folder: str) -> dict[int, float]:
    """Relative distance at each step of the run in `folder`; ValueError if it reports others."""
    run = losses(folder)
    if not run or not run.keys() <= reference.keys():
        raise ValueError(f"{folder}: steps {sorted(run)}, wanted some of {sorted(reference)}")
    return {step: abs(loss / reference[step] - 1) for step, loss in run.items()}


def within(reference: str, folder: str, *noisy: str) -> bool:
    """Prints how the run in `folder` lies in the noise about the reference run; True if inside."""
    base = losses(reference)
    noise = [distances(base, other) for other in noisy]
    run = distances(base, folder)
    worst, where = 0.0, 0
    for step, distance in run.items():
        seen = [d for other in noise for at, d in other.items() if at <= step + LEAD]
        ratio = distance / max(FACTOR * max(seen), LEAST)
        if not ratio <= worst:  # a loss that is no number is outside
            worst, where = ratio, step
    print(f"{len(run)} rows to step {max(run)}, largest distance {max(run.values()):.1e};", end=" ")
    print(f"at step {where} it is {worst:.2f} of what is allowed")
    return worst <= 1


if __name__ == "__main__":
    command, arguments = sys.argv[1], sys.argv[2:]
    if command == "perturb":
        perturb(*arguments)
    elif not within(*arguments):
        sys.exit(OUTSIDE)
