"""The running sequences as columns that change in place when one joins, grows or leaves.

So a step reads what it needs (last tokens, positions, sampling settings) without building it from the sequences.
Shapes: B running sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.inference.sampler import SamplingParams
from areal.engine.inference.sequence import PROCESS_ENDS, SequenceState
from areal.engine.model.device import to_device


class RunningBatch:
    """Row i belongs to the i-th running sequence."""

    def __init__(self, capacity: int) -> None:
        self.sequences: list[SequenceState] = []
        self._simple: bool | None = True
        """None = not known."""
        self._params: SamplingParams | None = None
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._positions = np.zeros(capacity, dtype=np.int64)
        self._temperatures = np.ones(capacity, dtype=np.float32)
        self._greedy = np.zeros(capacity, dtype=np.bool_)
        self._top_p = np.ones(capacity, dtype=np.float32)
        self._top_k = np.zeros(capacity, dtype=np.int64)
        self._seeds = np.zeros(capacity, dtype=np.uint64)
        self._counts = np.zeros(capacity, dtype=np.uint64)
        self._columns: tuple[Array, ...] = (
            self._ids,
            self._positions,
            self._temperatures,
            self._greedy,
            self._top_p,
            self._top_k,
            self._seeds,
            self._counts,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def ids(self) -> Tensor:
        """The last token of each, not yet in the cache; on the host."""
        return torch.from_numpy(self._ids[: len(self.sequences)])

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self._positions[: len(self.sequences)])

    @property
    def counts(self) -> Array:
        """How many tokens each has drawn."""
        counts: Array = self._counts[: len(self.sequences)]
        return counts

    @property
    def simple(self) -> bool:
        """No sequence asks for more than a length and stop tokens: when it joins, that is settled."""
        if self._simple is None:
            self._simple = all(sequence.simple for sequence in self.sequences)
        return self._simple

    @property
    def params(self) -> SamplingParams:
        if self._params is None:
            count = len(self.sequences)
            self._params = SamplingParams.of_columns(
                self._temperatures[:count],
                self._greedy[:count],
                self._top_p[:count],
                self._top_k[:count],
                self._seeds[:count],
            )
        return self._params

    def banned(self, logits: Tensor) -> Tensor | None:
        """The tokens that each may not draw, bool [B,V] where the logits are; None if there are none.

        A sequence whose grammar fails ends here, alone.
        """
        rows: list[int] = []
        masks: list[Array] = []
        for row, sequence in enumerate(self.sequences):
            try:
                mask = sequence.banned(logits.shape[1])
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                sequence.fail(error)
                continue
            if mask is not None:
                rows.append(row)
                masks.append(mask)
        if not rows:
            return None
        banned = torch.zeros_like(logits, dtype=torch.bool)
        there = to_device(torch.from_numpy(np.stack(masks)), logits.device)
        banned[to_device(torch.tensor(rows), logits.device)] = there
        return banned

    def join(self, sequence: SequenceState) -> None:
        """Take the next row, whose cache holds all tokens of the sequence."""
        row, g, limited = len(self.sequences), sequence.gconfig, sequence.limited
        temperature = sequence.temperature
        self._positions[row] = len(sequence.ids) - 1
        self._temperatures[row] = temperature or 1.0
        self._greedy[row] = temperature == 0
        self._top_p[row] = g.top_p if limited else 1.0
        self._top_k[row] = g.top_k if limited else 0
        self._seeds[row] = sequence.seed
        self._counts[row] = sequence.drawn
        self.sequences.append(sequence)
        self._simple = self.simple and sequence.simple
        self._params = None

    def grow(self, tokens: list[int]) -> None:
        """Each has drawn a token."""
        count = len(self.sequences)
        self._ids[:count] = tokens
        self._positions[:count] += 1
        self._counts[:count] += np.uint64(1)

    def leave(self, row: int) -> int | None:
        """Free a row; the last one takes its place. Returns which that was, None if none had to move."""
        last = self.sequences.pop()
        self._simple = self._simple or None
        self._params = None
        if row == len(self.sequences):
            return None
        self.sequences[row] = last
        for column in self._columns:
            column[row] = column[len(self.sequences)]
        return len(self.sequences)

    def clear(self) -> list[SequenceState]:
        """Remove all, and return them."""
        sequences, self.sequences = self.sequences, []
        self._simple, self._params = True, None
        return sequences
