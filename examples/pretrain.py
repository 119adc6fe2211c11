#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pre-trains a Mixture-of-Experts model of Transformers with the experts of your choice.

    python examples/pretrain.py train --model qwen3 --moe moeblas --data TEXT --csv loss.csv
    python examples/pretrain.py train --model qwen3 --moe grouped_mm --data TEXT --csv loss.csv
    python examples/pretrain.py plot loss.csv --out loss.png

Two runs that differ in --moe alone have the same weights, tokens, optimizer and attention, so
their times and losses can be compared. A step is forward, backward, clipping and AdamW (fused) on
bf16 parameters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from pretrain import experts, models, plot
from pretrain.data import Batches, load_tokens
from pretrain.loop import WARMUP, Record, Trainer, median_step_ms, train
from pretrain.profile import profile

DEFAULTS = {"full": (4096, 4), "tiny": (64, 2)}  # sequence, batch
PEAK_TFLOPS = 989.4  # dense bf16 of H100 and H200 (SXM), without sparsity
PROFILED = 3  # steps that --profile adds


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "train", help="train one model with one implementation of the experts"
    )
    run.add_argument("--model", choices=models.MODELS, default="qwen3")
    run.add_argument("--moe", choices=experts.IMPLEMENTATIONS, default="moeblas")
    run.add_argument("--data", type=Path, required=True, help="a text; a token is a byte of it, or")
    run.add_argument("--tokenizer", type=Path, help="what this tokenizer (a folder) makes of it")
    run.add_argument("--size", choices=DEFAULTS, default="full")
    run.add_argument("--steps", type=int, default=300)
    run.add_argument("--sequence", type=int, help="tokens of a sequence (4096; tiny: 64)")
    run.add_argument("--batch", type=int, help="sequences of a step (4; tiny: 2)")
    run.add_argument("--lr", type=float, default=3e-4)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--graph", action="store_true", help="one CUDA graph an iteration")
    run.add_argument("--compile", action="store_true", help="torch.compile every decoder layer")
    run.add_argument("--profile", action="store_true", help="after training: the shares of a step")
    run.add_argument("--csv", type=Path, help="append a row a step to this file")
    draw = commands.add_parser("plot", help="compare the runs of csv files: a table and a picture")
    draw.add_argument("csv", type=Path, nargs="+")
    draw.add_argument("--out", type=Path, default=Path("loss.png"))
    options = parser.parse_args(argv)
    if options.command == "train":
        _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    sequence, batch = DEFAULTS[options.size]
    options.sequence, options.batch = options.sequence or sequence, options.batch or batch
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, wanted at least 1")
    if options.graph and torch.device(options.device).type != "cuda":
        parser.error(f"--graph with --device {options.device}, wanted cuda")
    if options.graph and options.moe == "eager":
        parser.error(
            "--graph with --moe eager: its loop over experts reads the device, wanted another"
        )
    if options.graph and options.steps <= WARMUP:
        parser.error(f"--graph with --steps {options.steps}, wanted more than {WARMUP}")
    if options.profile and (options.graph or options.compile):
        parser.error(
            "--profile with --graph or --compile: ops cannot be told apart, wanted neither"
        )


def summary(options: argparse.Namespace, model: torch.nn.Module, record: Record) -> str:
    """One line with what the run measured."""
    tokens = options.batch * options.sequence
    ms = median_step_ms(record.times_ms)
    rate = tokens / ms * 1e3
    tail = record.losses[-10:]
    fields = {
        "model": options.model,
        "run": run_name(options),
        "step_ms": f"{ms:.2f}",
        "tokens_per_s": f"{rate:.0f}",
        "mfu_percent": "-",
        "peak_gib": "-",
        "loss": f"{sum(tail) / len(tail):.4f}",
    }
    if torch.device(options.device).type == "cuda":
        flops = models.flops_per_token(model, options.sequence) * rate
        fields["mfu_percent"] = f"{100 * flops / (PEAK_TFLOPS * 1e12):.1f}"
        fields["peak_gib"] = f"{record.peak_bytes / 2**30:.1f}"
    return "result: " + " ".join(f"{name}={value}" for name, value in fields.items())


def run_name(options: argparse.Namespace) -> str:
    """What tells a run of one model from another, in csv files and pictures."""
    seed = f"+seed{options.seed}" if options.seed != 1 else ""
    return options.moe + "+compile" * options.compile + "+graph" * options.graph + seed


def run_training(options: argparse.Namespace) -> None:
    experts.prepare(options.moe, options.model)
    device = torch.device(options.device)
    tokens, vocab = load_tokens(options.data, options.tokenizer)
    steps = options.steps + PROFILED * options.profile
    batches = Batches(tokens.to(device), steps, options.batch, options.sequence, options.seed)
    config = models.make_config(options.model, options.size, vocab, options.sequence)
    model = models.build(config, options.moe, device, getattr(torch, options.dtype), options.seed)
    if options.compile:
        for layer in model.model.layers:
            layer.compile()
    parameters = sum(p.numel() for p in model.parameters())
    shape = f"{options.batch} x {options.sequence} tokens a step, experts by {run_name(options)}"
    print(f"{options.model}, {parameters / 1e6:.1f} M parameters, {shape}", flush=True)
    trainer = Trainer(model, options.lr, warmup=20, capturable=options.graph)
    record = train(
        trainer,
        batches,
        options.steps,
        options.graph,
        lambda step, loss: print(f"step {step + 1} loss {loss:.4f}", flush=True),
    )
    if options.csv:
        plot.write_csv(options.csv, options.model, run_name(options), record)
    if options.profile:
        print(profile(trainer, batches, options.steps, PROFILED, median_step_ms(record.times_ms)))
    print(summary(options, model, record))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        if options.command == "plot":
            runs = plot.read_runs(options.csv)
            print(plot.table(runs))
            plot.draw(runs, options.out)
        else:
            run_training(options)
    except (experts.Refused, ValueError, OSError, NotImplementedError) as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
