"""Keys and values of sequences of about one length: one tensor, a slot for each.

Slots are dense: the sequences in it own the first ones. Its number of slots grows by doubling.
Shapes: L positions that a slot has room for, K key-value heads, E head dimension.
"""

# MERGED-DOC
# Keys and values of running sequences, a row each, and of the prompt that is not complete.
#
# Rows live in pools by length: a sequence that outgrows its pool moves to one with twice the room. So memory follows what
# sequences have, not how many there are times the longest of them, and those that are read together are about equally
# long. Which slot of which pool a row has is nobody else's business but the attention's.

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array

FIRST_POSITIONS = 1024
"""What a pool begins with, if that is a slot."""


@dataclass(frozen=True)
class CacheShape:
    layers: int
    heads: int
    """Key-value heads."""
    head_dim: int
    dtype: torch.dtype

    def zeros(self, slots: int, length: int) -> Tensor:
        """Zeros, because what lies behind a sequence is read and hidden, and must be numbers."""
        return torch.zeros(self.layers, slots, 2 * self.heads, length, self.head_dim, dtype=self.dtype)


class KeyValuePool:
    def __init__(self, shape: CacheShape, capacity: int, slots: int = 0) -> None:
        """`capacity` is L."""
        self.capacity = capacity
        self.owners: list[int] = []
        """Who has each slot."""
        self.shape = shape
        self._replace(shape.zeros(slots, capacity))

    @property
    def slots(self) -> int:
        return int(self.data.shape[1])

    def reserve(self, slots: int) -> bool:
        """Room for that many; whether it had to grow."""
        if slots <= self.slots:
            return False
        new = self.shape.zeros(max(slots, 2 * self.slots, FIRST_POSITIONS // self.capacity), self.capacity)
        new[:, : self.slots] = self.data
        self._replace(new)
        return True

    def places(self, slots: Tensor | slice, positions: Tensor) -> Tensor:
        """Where keys, then values, of tokens go, as indices [T*2K] of `flat`."""
        return (self._starts[slots] + positions[:, None]).flatten()

    def read(self, first: int, end: int, length: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [slots,K,length-start,E] of neighbouring slots, for each layer."""
        part = self.data[:, first:end, :, start:length]
        keys, values = torch.split_with_sizes(part, (self.shape.heads, self.shape.heads), dim=2)
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def block(self, slot: int, length: int) -> Tensor:
        """The first positions of a slot [layers,2K,length,E]."""
        return self.data[:, slot, :, :length]

    def _replace(self, data: Tensor) -> None:
        self.data = data
        self.flat = [layer.flatten(0, 2) for layer in data.unbind(0)]
        """Each layer as [slots*2K*L,E]."""
        slots, heads = data.shape[1:3]
        self._starts = torch.arange(slots * heads).view(slots, heads) * self.capacity


SMALLEST_POOL = 128
"""Positions."""


@dataclass
class CacheSlot:
    pool: KeyValuePool
    slot: int


class KeyValueCache:
    def __init__(self, shape: CacheShape, max_positions: int) -> None:
        self._shape = shape
        self._max_positions = max_positions
        self._pools: dict[int, KeyValuePool] = {}
        """By capacity."""
        self._homes: dict[int, CacheSlot] = {}
        self._lengths = np.zeros(0, dtype=np.int64)
        """How much of each row is in use."""
        self._capacities = np.zeros(0, dtype=np.int64)
        self.stage = KeyValuePool(shape, 0, slots=1)
        """The prompt that is not complete."""

    @property
    def pools(self) -> list[KeyValuePool]:
        """Those that have rows, by capacity."""
        return [pool for _, pool in sorted(self._pools.items()) if pool.owners]

    def home(self, row: int) -> CacheSlot:
        return self._homes[row]

    def block(self, row: int, length: int) -> Tensor:
        """The first positions of a row [layers,2K,length,E]."""
        home = self._homes[row]
        return home.pool.block(home.slot, length)

    def put(self, row: int, length: int) -> None:
        """A row for a sequence of that length; what it held is gone."""
        if row in self._homes:
            self._free(row)
        self._note_rows(row + 1)
        self._settle(row, self._capacity(length))
        self._lengths[row] = length

    def keep(self, rows: int) -> None:
        """Only the first `rows` rows are in use."""
        if len(self._homes) != rows:
            for row in [row for row in self._homes if row >= rows]:
                self._free(row)

    def advance(self, lengths: Sequence[int]) -> None:
        """The first rows are about to have these lengths."""
        count = len(lengths)
        self._lengths[:count] = lengths
        grown = np.flatnonzero(self._lengths[:count] > self._capacities[:count]).tolist()
        if not grown:
            return
        for capacity, number in Counter(self._capacity(lengths[row]) for row in grown).items():
            self._pool(capacity, number)
        # The last of a pool first, so that nothing takes its place.
        for row in sorted(grown, key=lambda row: -self._homes[row].slot):
            held = self.block(row, lengths[row] - 1)
            home = self._homes.pop(row)
            self._settle(row, self._capacity(lengths[row]))
            self.block(row, lengths[row] - 1)[:] = held
            self._vacate(home, row)
        self._pools = {size: pool for size, pool in self._pools.items() if pool.owners}

    def move(self, source: int, target: int) -> None:
        """Let the sequence in row `source` live in row `target`; what that held is gone."""
        if target in self._homes:
            self._free(target)
        home = self._homes[target] = self._homes.pop(source)
        home.pool.owners[home.slot] = target
        for column in (self._lengths, self._capacities):
            column[target] = column[source]

    def reserve_stage(self, length: int) -> None:
        """Room for that much of the prompt that is not complete."""
        if length > self.stage.capacity:
            old = self.stage
            self.stage = KeyValuePool(self._shape, min(max(length, 2 * old.capacity), self._max_positions), slots=1)
            self.stage.block(0, old.capacity)[:] = old.block(0, old.capacity)

    def _capacity(self, length: int) -> int:
        """Of the pool for sequences of that length."""
        capacity = SMALLEST_POOL
        while capacity < length:
            capacity *= 2
        return min(capacity, self._max_positions)

    def _pool(self, capacity: int, more: int) -> KeyValuePool:
        """With room for so many more."""
        if capacity not in self._pools:
            self._pools[capacity] = KeyValuePool(self._shape, capacity)
        pool = self._pools[capacity]
        if pool.reserve(len(pool.owners) + more):  # a good moment to give back what nobody needs any more
            self._pools = {size: each for size, each in self._pools.items() if each.owners or each is pool}
        return pool

    def _settle(self, row: int, capacity: int) -> None:
        pool = self._pool(capacity, 1)
        self._homes[row] = CacheSlot(pool, len(pool.owners))
        self._capacities[row] = capacity
        pool.owners.append(row)

    def _free(self, row: int) -> None:
        self._vacate(self._homes.pop(row), row)

    def _vacate(self, home: CacheSlot, row: int) -> None:
        """The last of the pool takes the place that is free."""
        pool, last = home.pool, home.pool.owners.pop()
        if last != row:
            length = int(self._lengths[last])
            pool.block(home.slot, length)[:] = pool.block(len(pool.owners), length)
            pool.owners[home.slot] = last
            self._homes[last].slot = home.slot

    def _note_rows(self, rows: int) -> None:
        if rows > len(self._lengths):
            self._lengths = _longer(self._lengths, 2 * rows)
            self._capacities = _longer(self._capacities, 2 * rows)


def _longer(column: Array, length: int) -> Array:
    return np.concatenate((column, np.zeros(length - len(column), dtype=column.dtype)))
