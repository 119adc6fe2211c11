#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model with the experts of moeblas and of torch: how far do the losses end apart?

    python bench/accuracy/training.py --csv bench/results/training_gap.csv

Idea: examples/pretrain.py's own model and loop; two runs differ in the experts alone, so that
weights and batches are the same. Training is chaotic: a difference in the last bit grows whatever
its cause. How much is shown by the second reference, torch's grouped product, which computes what
its eager loop does in another order. Losses are means over 50 steps.
"""
from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from pretrain import experts, models  # noqa: E402
from pretrain.data import Batches  # noqa: E402
from pretrain.loop import Trainer, train  # noqa: E402

WINDOW = 50  # steps that one row of the table is the mean of
REFERENCE = "eager"


def text() -> torch.Tensor:
    """The bytes of the repository's documents and headers as tokens, int64."""
    names = subprocess.run(
        ["git", "ls-files", "README.md", "docs/*.md", "include", "src/*.[ch]"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    joined = b"".join((ROOT / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def losses(
    options: argparse.Namespace, tokens: torch.Tensor, moe: str, dtype: str, seed: int
) -> list[float]:
    """The loss of every step of one run."""
    experts.prepare(moe, options.model)
    device = torch.device(options.device)
    batches = Batches(tokens.to(device), options.steps, options.batch, options.sequence, seed)
    config = models.make_config(options.model, "tiny", 256, options.sequence)
    model = models.build(config, moe, device, getattr(torch, dtype), seed)
    trainer = Trainer(model, options.lr, warmup=20, capturable=False)
    return train(trainer, batches, options.steps, False, lambda step, loss: None).losses


def gaps(rows: list[dict[str, str]]) -> list[str]:
    """One line a dtype and implementation: per cent from the reference's last mean, by seed."""
    last: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:  # rows of one run ascend, the last one stays
        last[row["dtype"], row["experts"]][row["seed"]] = float(row["loss"])
    lines = []
    for (dtype, moe), ends in sorted(last.items()):
        reference = last[dtype, REFERENCE]
        mean = sum(reference.values()) / len(reference)
        if moe == REFERENCE:
            spread = 100 * (max(ends.values()) - min(ends.values())) / mean
            lines.append(f"{dtype} {moe}: mean {mean:.4f}, seeds spread over {spread:.2f} %")
            continue
        by_seed = [100 * (ends[seed] / reference[seed] - 1) for seed in sorted(ends)]
        over_all = 100 * (sum(ends.values()) / len(ends) / mean - 1)
        listed = ", ".join(f"{gap:+.3f} %" for gap in by_seed)
        lines.append(f"{dtype} {moe}: mean {over_all:+.3f} %, by seed {listed}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=models.MODELS, default="qwen3")
    parser.add_argument("--experts", nargs="+", default=[REFERENCE, "moeblas", "grouped_mm"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    if options.steps % WINDOW or REFERENCE not in options.experts:
        wanted = f"wanted a multiple of {WINDOW}, and {REFERENCE}"
        parser.error(f"--steps {options.steps}, --experts {options.experts}: {wanted}")
    rows, tokens = [], text()
    with options.csv.open("w", encoding="utf-8", newline="") as file:
        names = ["dtype", "seed", "experts", "step", "loss"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for dtype in options.dtypes:
            for seed in options.seeds:
                for moe in options.experts:
                    values = losses(options, tokens, moe, dtype, seed)
                    for end in range(WINDOW, options.steps + 1, WINDOW):
                        mean = sum(values[end - WINDOW : end]) / WINDOW
                        run = {"dtype": dtype, "seed": str(seed), "experts": moe}
                        rows.append(run | {"step": str(end), "loss": f"{mean:.6f}"})
                        writer.writerow(rows[-1])
                    file.flush()
                    print(f"{dtype} seed {seed} {moe}: {rows[-1]['loss']}", flush=True)
    print("\n".join(gaps(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
