"""Drive a runner that takes whole prompts only: a prompt has one piece, and nothing is remembered."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.engine.model_runner import ModelRunner, Piece


class WholePrompts:
    """Implements `MixedRunner`."""

    chunk_tokens = sys.maxsize
    shortest_prefix = sys.maxsize

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.move = runner.move

    def known(self, ids: list[int]) -> int:
        return 0

    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        parts = []
        if len(ids):
            parts.append(self._runner.decode(ids.tolist(), positions.tolist()))
        if pieces:
            parts.append(self._prefill(pieces))
        return torch.cat(parts)

    def remember(self, row: int, ids: list[int]) -> None:
        pass

    def _prefill(self, pieces: Sequence[Piece]) -> Tensor:
        homes = [(row, piece) for piece in pieces for row in piece.rows]
        logits = self._runner.prefill(
            [row for row, _ in homes], [piece.ids for _, piece in homes], [piece.images for _, piece in homes]
        )
        firsts = [i for i, (row, piece) in enumerate(homes) if row == piece.rows[0]]
        return logits[firsts]
