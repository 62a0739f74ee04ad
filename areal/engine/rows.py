"""What a step needs to know of the running sequences, as columns that change in place when one joins, ends or grows."""

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.sampler import Choices
from areal.engine.sequence import Sequence


class Rows:
    """Row i belongs to the i-th running sequence."""

    def __init__(self, capacity: int) -> None:
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
        self._choices: Choices | None = None
        self.simple = True
        """None asks for more than a length and stop tokens; known once `choices` was read."""
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def ids(self) -> Tensor:
        """The last token of each, not yet in the cache."""
        return torch.from_numpy(self._ids[: len(self.sequences)])

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self._positions[: len(self.sequences)])

    @property
    def counts(self) -> Array:
        """How many tokens each has drawn."""
        counts: Array = self._counts[: len(self.sequences)]
        return counts

    def join(self, sequence: Sequence) -> None:
        """The next row; its cache holds all of its tokens."""
        row, g = len(self.sequences), sequence.gconfig
        temperature = sequence.temperature
        self._positions[row] = len(sequence.ids) - 1
        self._temperatures[row] = temperature or 1.0
        self._greedy[row] = temperature == 0
        self._top_p[row] = g.top_p
        self._top_k[row] = g.top_k
        self._seeds[row] = sequence.seed
        self._counts[row] = sequence.drawn
        self.sequences.append(sequence)
        self._choices = None

    def leave(self, row: int) -> int | None:
        """Remove a row; the last one takes its place. Returns which that was, None if none had to move."""
        last = self.sequences.pop()
        self._choices = None
        if row == len(self.sequences):
            return None
        self.sequences[row] = last
        for column in self._columns:
            column[row] = column[len(self.sequences)]
        return len(self.sequences)

    def grow(self, tokens: list[int]) -> None:
        """Each has drawn a token."""
        count = len(self.sequences)
        self._ids[:count] = tokens
        self._positions[:count] += 1
        self._counts[:count] += np.uint64(1)

    def clear(self) -> list[Sequence]:
        """Remove all, and return them."""
        sequences, self.sequences = self.sequences, []
        self._choices = None
        return sequences

    @property
    def choices(self) -> Choices:
        if self._choices is None:
            self._choices = self._read_choices(len(self.sequences))
            self.simple = all(sequence.simple for sequence in self.sequences)
        return self._choices

    def _read_choices(self, count: int) -> Choices:
        temperatures, top_p, top_k = self._temperatures[:count], self._top_p[:count], self._top_k[:count]
        greedy = self._greedy[:count]
        return Choices(
            temperatures=torch.from_numpy(temperatures),
            greedy=torch.from_numpy(greedy),
            top_p=torch.from_numpy(top_p),
            top_k=torch.from_numpy(top_k),
            seeds=self._seeds[:count],
            limited=bool((top_p < 1).any() or (top_k > 0).any()),
            tempered=bool((temperatures != 1).any()),
            some_greedy=bool(greedy.any()),
        )
