"""Which running sequences begin alike: their common tokens are read once for all of them, not once for each.

Rows are compared by what they were filled with (prompts, or whole sequences after a weight swap), whoever asked for
them: the samples of a group, conversations with one system prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from areal.api.messages import Array

CALL_POSITIONS = 128
"""A call of attention costs about as much as reading this many positions of a row."""
LEAST_SAVED = 4 * CALL_POSITIONS
"""Positions that need not be read: fewer cost less than what joining the two parts does."""


@dataclass(frozen=True)
class SharedStart:
    """Rows whose first `length` tokens are equal."""

    rows: list[int]
    length: int

    @property
    def pays(self) -> bool:
        return (len(self.rows) - 1) * self.length >= LEAST_SAVED

    def among(self, rows: list[int]) -> "SharedStart | None":
        """The same for those of its rows that are in `rows`, by their places there; None if it does not pay.

        Rows that share nothing stand between, and each stretch of those that do is a call.
        """
        members = set(self.rows)
        places = [place for place, row in enumerate(rows) if row in members]
        cuts = sum(after - before > 1 for before, after in pairwise(places))
        saved = (len(places) - 1) * self.length - 2 * cuts * CALL_POSITIONS
        return SharedStart(places, self.length) if saved >= LEAST_SAVED else None


class SharedRows:
    def __init__(self, shortest: int) -> None:
        """Beginnings of fewer than `shortest` tokens are not looked at."""
        self._shortest = shortest
        self._filled: dict[int, Array] = {}
        self._found: tuple[int, list[SharedStart]] | None = None

    def fill(self, row: int, ids: Sequence[int]) -> None:
        """The row begins with these tokens now."""
        self._filled[row] = np.array(ids, dtype=np.int64)
        self._found = None

    def move(self, source: int, target: int) -> None:
        self._filled[target] = self._filled[source]
        self._found = None

    def starts(self, rows: int) -> list[SharedStart]:
        """What is common to some of the first `rows` rows; no row is in two."""
        if self._found is None or self._found[0] != rows:
            self._found = rows, self._search(rows)
        return self._found[1]

    def _search(self, rows: int) -> list[SharedStart]:
        """In sorted order those that begin alike are neighbours; one that would halve what is shared stays out."""
        long_enough = [row for row in range(rows) if len(self._filled[row]) >= self._shortest]
        found: list[SharedStart] = []
        members: list[int] = []
        length = 0
        for row in sorted(long_enough, key=lambda row: self._filled[row].tolist()):
            kept = _common(self._filled[members[0]][:length], self._filled[row]) if members else 0
            if members and kept >= max(self._shortest, length // 2):
                members.append(row)
                length = kept
                continue
            found.append(SharedStart(members, length))
            members, length = [row], len(self._filled[row])
        found.append(SharedStart(members, length))
        return [start for start in found if start.pays]


def _common(one: Array, other: Array) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
