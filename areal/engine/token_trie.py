"""Sequences that begin alike as a trie: each shared prefix is there once, and a token sees its ancestors."""

import numpy as np

from areal.api.messages import Array

Stretch = tuple[int, int]
"""Nodes from the first number up to the second."""


class TokenTrie:
    """Sequences are added in sorted order, so what one shares with any other it shares with the last."""

    def __init__(self) -> None:
        self.ids: list[Array] = []
        self.depths: list[Array] = []
        self.size = 0
        self.is_plain = True
        """Each sequence goes on where the last one ended: a token sees whatever stands before it."""
        self._blocks: list[list[Stretch]] = []
        """Per sequence: its path, of which the last stretch is new."""
        self._last = np.empty(0, dtype=np.int64)
        self._path = np.empty(0, dtype=np.int64)

    @property
    def longest(self) -> int:
        """Tokens that a sequence has to itself, at most."""
        return max(len(part) for part in self.ids)

    def shared(self, ids: Array) -> int:
        """How many tokens `ids` has in common with the last sequence."""
        length = min(len(ids), len(self._last))
        if length == 0:
            return 0
        differs = ids[:length] != self._last[:length]
        first = int(differs.argmax())
        return first if differs[first] else length

    def add(self, ids: Array, kept: int) -> Array:
        """Add a sequence that shares its first `kept` tokens; return the node of each of its tokens."""
        end = self.size + len(ids) - kept
        self.is_plain = self.is_plain and kept == self.size
        self._path = np.concatenate((self._path[:kept], np.arange(self.size, end)))
        self.ids.append(ids[kept:])
        self.depths.append(np.arange(kept, len(ids)))
        known = _cut(self._blocks[-1], kept) if self._blocks else []
        self._blocks.append([*known, (self.size, end)])
        self._last, self.size = ids, end
        return self._path

    def open(self, mask: Array, triangle: Array) -> None:
        """Write 0 into `mask[size,size]` where a node sees another; `triangle` has -inf above its diagonal, else 0."""
        for *known, (start, end) in self._blocks:
            for first, last in known:
                mask[start:end, first:last] = 0.0
            mask[start:end, start:end] = triangle[: end - start, : end - start]


def _cut(path: list[Stretch], length: int) -> list[Stretch]:
    """The first `length` nodes of a path."""
    kept: list[Stretch] = []
    for start, end in path:
        if length <= 0:
            break
        kept.append((start, min(end, start + length)))
        length -= end - start
    return kept
