# SPDX-License-Identifier: Apache-2.0
"""Tokens of a text, on the device, and the batches of a run.

Idea: all windows of a run are drawn once from the seed, so that two runs see the same tokens and no
step waits for the host.
"""

from __future__ import annotations

from pathlib import Path

import torch


def load_tokens(path: Path, tokenizer: Path | None) -> tuple[torch.Tensor, int]:
    """The text as int64 tokens, and the size of the vocabulary.

    Without a tokenizer a token is a byte; else ``tokenizer`` is a folder that
    ``AutoTokenizer.from_pretrained`` reads.
    """
    if tokenizer is None:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long(), 256
    from transformers import AutoTokenizer

    coder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    ids = coder(path.read_text(encoding="utf-8", errors="replace"))["input_ids"]
    return torch.tensor(ids), len(coder)


class Batches:
    """``steps`` batches [batch, sequence] of random windows of ``tokens``; indexed by the step."""

    def __init__(
        self, tokens: torch.Tensor, steps: int, batch: int, sequence: int, seed: int
    ) -> None:
        if tokens.numel() < sequence + 1:
            raise ValueError(f"--data has {tokens.numel()} tokens, wanted more than {sequence}")
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(tokens.numel() - sequence, (steps, batch, 1), generator=generator)
        self._tokens = tokens
        self._starts = starts.to(tokens.device)
        self._window = torch.arange(sequence, device=tokens.device)

    def __getitem__(self, step: int) -> torch.Tensor:
        return self._tokens[self._starts[step] + self._window]
