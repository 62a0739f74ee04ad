"""Which prompts, and how much of each, share the next step with the running sequences.

First come, first served. Equal prompts are computed once, and a prompt that begins like one of this step waits until
the next, where that beginning is remembered. At most one prompt is computed in part; it is the first in the queue.
"""

# MERGED-DOC
# Drive a runner that takes whole prompts only: a prompt has one piece, and nothing is remembered.

import sys
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.engine.inference.model_runner import MixedRunner, ModelRunner, Piece
from areal.engine.inference.sequence import SequenceState


class StepScheduler:
    def __init__(self, runner: MixedRunner) -> None:
        self._runner = runner
        self._queue: deque[SequenceState] = deque()
        self._partial: SequenceState | None = None
        self._computed = 0
        """Tokens of `_partial` that need not be computed any more."""
        self.sources: list[int] = []
        """For each sequence that joins in this step, the piece that is its prompt's last."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def begun(self) -> list[SequenceState]:
        """Those that have drawn tokens under weights that are gone."""
        return [sequence for sequence in self._queue if sequence.drawn]

    def add(self, sequence: SequenceState) -> None:
        self._queue.append(sequence)

    def discard(self, sequence: SequenceState) -> None:
        """Forget a sequence, if it is here."""
        if sequence in self._queue:
            self._queue.remove(sequence)
            self._forget_partial(sequence)

    def begin_again(self, sequences: list[SequenceState]) -> None:
        """The weights have changed: nothing that was computed holds, and who was running goes first."""
        self._partial = None
        self._queue.extendleft(reversed(sequences))

    def clear(self) -> list[SequenceState]:
        sequences = list(self._queue)
        self._queue.clear()
        return sequences

    def pieces(self, first_row: int, room: int) -> tuple[list[Piece], list[SequenceState]]:
        """What to compute, and who joins the running in rows from `first_row` on when it is done."""
        if not self._queue:
            return [], []
        budget, step = self._runner.chunk_tokens, _Step(first_row)
        while self._queue and len(step.joining) < room and budget > 0:
            sequence = self._queue[0]
            if sequence.done.done():
                self.discard(sequence)
                continue
            if step.join_equal(sequence):
                self._queue.popleft()
                continue
            staged = sequence is self._partial
            start = self._computed if staged else self._runner.known(sequence.ids)
            if step.begins_alike(sequence, start, self._runner.shortest_prefix):
                break
            end = min(len(sequence.ids), start + budget)
            step.add(sequence, start, end, staged)
            budget -= end - start
            if end < len(sequence.ids):
                self._partial, self._computed = sequence, end
                break
            self._forget_partial(sequence)
            self._queue.popleft()
        self.sources = step.sources
        return step.pieces, step.joining

    def _forget_partial(self, sequence: SequenceState) -> None:
        if sequence is self._partial:
            self._partial = None


class _Step:
    """What has been chosen for one step so far."""

    def __init__(self, first_row: int) -> None:
        self._first_row = first_row
        self.pieces: list[Piece] = []
        self.joining: list[SequenceState] = []
        self.sources: list[int] = []
        self._whole: dict[tuple[tuple[int, ...], tuple[bytes, ...]], int] = {}
        self._beginnings: set[tuple[int, tuple[int, ...]]] = set()

    def join_equal(self, sequence: SequenceState) -> bool:
        """Whether the same prompt is computed anyway; then it joins."""
        source = self._whole.get((tuple(sequence.ids), sequence.images))
        if source is None:
            return False
        self._join(sequence, source)
        self.pieces[source].rows.append(self._first_row + len(self.joining) - 1)
        return True

    def begins_alike(self, sequence: SequenceState, start: int, length: int) -> bool:
        """Whether what has to be computed begins like something that was chosen."""
        if len(sequence.ids) - start <= length:
            return False
        beginning = (start, tuple(sequence.ids[start : start + length]))
        if beginning in self._beginnings:
            return True
        self._beginnings.add(beginning)
        return False

    def add(self, sequence: SequenceState, start: int, end: int, staged: bool) -> None:
        row = self._first_row + len(self.joining)
        piece = Piece([row], list(sequence.ids), start, end, staged, sequence.images)
        self.pieces.append(piece)
        if piece.last:
            self._whole[tuple(sequence.ids), sequence.images] = len(self.pieces) - 1
            self._join(sequence, len(self.pieces) - 1)

    def _join(self, sequence: SequenceState, source: int) -> None:
        self.joining.append(sequence)
        self.sources.append(source)


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
