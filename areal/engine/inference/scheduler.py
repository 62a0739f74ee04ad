"""Which sequences share the next step, and how much of each prompt: two queues, and what moves between them.

Sequences wait, first come, first served; then they run, one token per step, until they end. Equal prompts are computed
once, and a prompt that begins like another of the same step waits until the next one, where that beginning is cached.

Invariants:
- The i-th running sequence owns cache row i; when one leaves, the last takes its row.
- At most one prompt is computed in part, and it is the first that waits.
- A sequence that is suspected of having made a step fail joins alone, so that it is known if the next one fails too.
"""

from collections import deque

import torch
from torch import Tensor

from areal.engine.inference.batch import RunningBatch
from areal.engine.inference.model_runner import MixedRunner, Piece
from areal.engine.inference.sequence import SequenceState
from areal.engine.model.device import to_device


class StepScheduler:
    def __init__(self, runner: MixedRunner, max_running: int) -> None:
        self.running = RunningBatch(max_running)
        self.some_ended = False
        """A running sequence is done, and `remove_ended` has something to do."""
        self._waiting: deque[SequenceState] = deque()
        self._runner = runner
        self._max_running = max_running
        self._partial: SequenceState | None = None
        """The waiting sequence whose first `_computed` tokens earlier steps computed."""
        self._computed = 0
        self._cache_is_stale = False
        self._joining: list[SequenceState] = []
        """The sequences whose prompts the last step computed, in part or to their end."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self.running)

    @property
    def waiting(self) -> int:
        """How many have not drawn a token."""
        return len(self._waiting) - len(self.restarting)

    @property
    def restarting(self) -> list[SequenceState]:
        """Those that wait to go on under new weights."""
        return [sequence for sequence in self._waiting if sequence.drawn]

    def add(self, sequence: SequenceState) -> None:
        self._waiting.append(sequence)

    def schedule(self) -> "Step":
        """What to compute next. Sequences whose prompts this completes are running from here on."""
        self.remove_ended()
        if self._cache_is_stale:
            self._partial = None
            self._waiting.extendleft(reversed(self.running.clear()))
            self._cache_is_stale = False
        step = Step(self.running.ids, self.running.positions)
        self._joining = step.joining
        if self._waiting:
            self._add_prompts(step, self._max_running)
        return step

    def restart(self) -> None:
        """The weights have changed: nothing in the cache holds, and running sequences are computed again first."""
        self._cache_is_stale = True

    def start_over(self) -> list[SequenceState]:
        """The runner has lost its rows: all sequences wait again, those that ran longest first.

        Returns whom to suspect if the last step was the cause: those that joined in it, or all if none did.
        """
        suspects = self._joining or list(self.running.sequences)
        ran = [sequence for sequence in self.running.clear() if not sequence.done.done()]
        self._waiting.extendleft(reversed(ran))
        self._partial = None
        self._joining = []
        self._cache_is_stale = self.some_ended = False
        return suspects

    def remove_ended(self) -> None:
        """Free the rows of sequences that are done; a later prompt may begin with one of them and its answer."""
        if not self.some_ended:
            return
        self.some_ended = False
        running = self.running
        for row in reversed(range(len(running))):  # so that the last row, which moves, is never one that ended
            sequence = running.sequences[row]
            if not sequence.done.done():
                continue
            if not sequence.done.cancelled() and not self._cache_is_stale:
                self._runner.remember(row, sequence.ids[:-1])
            moved = running.leave(row)
            if moved is not None:
                self._runner.move(moved, row, len(running.sequences[row].ids))

    def abort(self, sequence: SequenceState) -> None:
        """The caller is gone: a waiting sequence leaves now, a running one before the next step, a finished one has."""
        if not sequence.done.cancel() and not sequence.done.cancelled():
            sequence.done.exception()  # marks it as retrieved: it has no reader any more
        self.some_ended = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._forget_partial(sequence)

    def clear(self) -> list[SequenceState]:
        """Remove all, and return them."""
        sequences = [*self._waiting, *self.running.clear()]
        self._waiting.clear()
        return sequences

    def _add_prompts(self, step: "Step", max_running: int) -> None:
        """Fill the step with prompts, as far as there are rows and tokens for them."""
        budget = self._runner.chunk_tokens
        while self._waiting and len(self.running) < max_running and budget > 0:
            sequence = self._waiting[0]
            if sequence.failures and step.pieces:
                break
            if sequence.done.done() or step.join_equal(sequence, self.running):
                self._forget_partial(sequence)
                self._waiting.popleft()
                continue
            step.joining.append(sequence)
            continued = sequence is self._partial
            start = self._computed if continued else self._runner.cached_tokens(sequence.ids)
            if step.begins_alike(sequence, start, self._runner.shortest_prefix):
                step.joining.pop()
                break
            end = min(len(sequence.ids), start + budget)
            step.add(sequence, start, end, continued, self.running)
            budget -= end - start
            if end < len(sequence.ids):
                self._partial, self._computed = sequence, end
                break
            self._forget_partial(sequence)
            self._waiting.popleft()
            if sequence.failures:
                break

    def _forget_partial(self, sequence: SequenceState) -> None:
        if sequence is self._partial:
            self._partial = None


class Step:
    """The next token of each sequence that was running, and pieces of prompts."""

    def __init__(self, ids: Tensor, positions: Tensor) -> None:
        self.ids = ids
        self.positions = positions
        self.pieces: list[Piece] = []
        self.joining: list[SequenceState] = []
        """Whose prompts these are."""
        self._sources: list[int] = []
        """For each sequence that joins, the piece that completes its prompt."""
        self._complete: dict[tuple[tuple[int, ...], tuple[bytes, ...]], int] = {}
        """By prompt and images, the piece that completes them."""
        self._beginnings: set[tuple[int, tuple[int, ...]]] = set()

    def join_equal(self, sequence: SequenceState, running: RunningBatch) -> bool:
        """Whether this step computes the same prompt anyway; then the sequence joins."""
        source = self._complete.get((tuple(sequence.ids), sequence.images))
        if source is None:
            return False
        self.joining.append(sequence)
        self.pieces[source].rows.append(len(running))
        self._sources.append(source)
        running.join(sequence)
        return True

    def begins_alike(self, sequence: SequenceState, start: int, length: int) -> bool:
        """Whether what has to be computed begins like something that this step computes; noted if not."""
        if len(sequence.ids) - start <= length:
            return False
        beginning = (start, tuple(sequence.ids[start : start + length]))
        if beginning in self._beginnings:
            return True
        self._beginnings.add(beginning)
        return False

    def add(self, sequence: SequenceState, start: int, end: int, continued: bool, running: RunningBatch) -> None:
        """Compute the tokens from `start` to `end`; a sequence whose prompt they complete joins."""
        piece = Piece([len(running)], list(sequence.ids), start, end, continued, sequence.images)
        self.pieces.append(piece)
        if piece.last:
            source = len(self.pieces) - 1
            self._complete[tuple(sequence.ids), sequence.images] = source
            self._sources.append(source)
            running.join(sequence)

    def logits_of_running(self, logits: Tensor) -> Tensor:
        """One row of logits for each running sequence, from what the runner computed for the step."""
        if all(len(piece.rows) == 1 for piece in self.pieces):
            return logits
        first = len(self.ids)  # equal prompts were computed once
        rows = torch.tensor([*range(first), *(first + source for source in self._sources)])
        return logits[to_device(rows, logits.device)]
