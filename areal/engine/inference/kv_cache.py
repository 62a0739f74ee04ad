"""Keys and values of running sequences, a row each, and of the prompt that is computed in part.

Rows live in pools by length: a sequence that outgrows its pool moves to one with twice the room. So memory follows the
sequences' own lengths, not their number times the longest of them, and rows that are read together are about equally
long. Only attention needs to know which slot of which pool a row has. It knows nothing of weights.

A row that leaves a dense cache gives its slot to the last of its pool, so that the rows of a pool are neighbours. That
is a copy of all that the last row holds, which is for nothing where a kernel reads each row by itself: there the slot
stays free for the next row.

Shapes: L positions that a slot has room for, K key-value heads, E head dimension.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.model.device import CPU

SMALLEST_POOL = 128
"""Positions."""
NOBODY = -1
_FIRST_POSITIONS = 1024
"""Positions that a new pool has room for, over all of its slots; one slot at least."""


@dataclass(frozen=True)
class CacheShape:
    layers: int
    heads: int
    """Key-value heads."""
    head_dim: int
    dtype: torch.dtype
    device: torch.device = CPU

    def zeros(self, slots: int, length: int) -> Tensor:
        """Zeros, because positions after a sequence's end are read and masked, and must be numbers."""
        size = (self.layers, slots, 2 * self.heads, length, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


class KeyValueCache:
    def __init__(self, shape: CacheShape, max_positions: int, *, dense: bool = True) -> None:
        """`dense`: the rows of a pool have its first slots."""
        self.partial = KeyValuePool(shape, 0, slots=1)
        """The prompt that is computed in part."""
        self.device = shape.device
        self.moves = 0
        """Counts up whenever a row may be in another place than before."""
        self._dense = dense
        self._shape = shape
        self._max_positions = max_positions
        self._pools: dict[int, KeyValuePool] = {}
        """By capacity."""
        self._slots: dict[int, CacheSlot] = {}
        """By row."""
        self._lengths = np.zeros(0, dtype=np.int64)
        """How much of each row is in use."""
        self._capacities = np.zeros(0, dtype=np.int64)

    @property
    def pools(self) -> "list[KeyValuePool]":
        """Those that have rows, by capacity."""
        return [pool for _, pool in sorted(self._pools.items()) if pool.rows]

    def slot_of(self, row: int) -> "CacheSlot":
        return self._slots[row]

    def block(self, row: int, length: int) -> Tensor:
        """The first positions of a row [layers,2K,length,E]."""
        place = self._slots[row]
        return place.pool.block(place.slot, length)

    def put(self, row: int, length: int) -> None:
        """Make a row for a sequence of that length; its old contents are lost."""
        if row in self._slots:
            self._free(row)
        if row >= len(self._lengths):
            self._lengths = _longer(self._lengths, 2 * (row + 1))
            self._capacities = _longer(self._capacities, 2 * (row + 1))
        self._assign(row, self._capacity(length))
        self._lengths[row] = length

    def copy(self, source: int, rows: Sequence[int], length: int) -> None:
        """Fill rows with the first positions of row `source`; all of them were put for one length."""
        place = self._slots[source]
        blocks = place.pool.data[:, :, :, :length]
        block = blocks.select(1, place.slot)
        for row in rows:  # one assignment to all of them, by an index, takes up to three times as long
            blocks.select(1, self._slots[row].slot).copy_(block)

    def keep(self, rows: int) -> None:
        """Free all but the first `rows` rows."""
        if len(self._slots) != rows:
            for row in [row for row in self._slots if row >= rows]:
                self._free(row)

    def advance(self, lengths: Sequence[int] | Array) -> None:
        """The first rows are about to have these lengths."""
        count = len(lengths)
        self._lengths[:count] = lengths
        outgrown = self._lengths[:count] > self._capacities[:count]
        if not outgrown.any():
            return
        grown = np.flatnonzero(outgrown).tolist()
        for capacity, number in Counter(self._capacity(lengths[row]) for row in grown).items():
            self._pool(capacity, number)
        # The last of a pool first, so that no other row moves into a slot that is about to be freed.
        for row in sorted(grown, key=lambda row: -self._slots[row].slot):
            held = self.block(row, lengths[row] - 1)
            place = self._slots.pop(row)
            self._assign(row, self._capacity(lengths[row]))
            self.block(row, lengths[row] - 1)[:] = held
            self._vacate(place, row)
        self._pools = {size: pool for size, pool in self._pools.items() if pool.rows}

    def move(self, source: int, target: int) -> None:
        """Move the sequence in row `source` to row `target`, whose old contents are lost."""
        self.moves += 1
        if target in self._slots:
            self._free(target)
        place = self._slots[target] = self._slots.pop(source)
        place.pool.owners[place.slot] = target
        for column in (self._lengths, self._capacities):
            column[target] = column[source]

    def reserve_partial(self, length: int) -> None:
        """Make room for that much of the prompt that is computed in part."""
        if length > self.partial.capacity:
            old = self.partial
            self.partial = KeyValuePool(self._shape, min(max(length, 2 * old.capacity), self._max_positions), slots=1)
            self.partial.block(0, old.capacity)[:] = old.block(0, old.capacity)

    def _capacity(self, length: int) -> int:
        """Of the pool for sequences of that length."""
        capacity = SMALLEST_POOL
        while capacity < length:
            capacity *= 2
        return min(capacity, self._max_positions)

    def _pool(self, capacity: int, more: int) -> "KeyValuePool":
        """The pool of that capacity, with room for `more` more sequences."""
        if capacity not in self._pools:
            self._pools[capacity] = KeyValuePool(self._shape, capacity)
        pool = self._pools[capacity]
        if pool.reserve(pool.rows + more):  # memory grows: give back the pools that are empty
            self._pools = {size: each for size, each in self._pools.items() if each.rows or each is pool}
        return pool

    def _assign(self, row: int, capacity: int) -> None:
        self.moves += 1
        pool = self._pool(capacity, 1)
        self._slots[row] = CacheSlot(pool, pool.take(row))
        self._capacities[row] = capacity

    def _free(self, row: int) -> None:
        self._vacate(self._slots.pop(row), row)

    def _vacate(self, place: "CacheSlot", row: int) -> None:
        """The last of a dense pool moves into the slot."""
        self.moves += 1
        if not self._dense:
            place.pool.free(place.slot)
            return
        pool, last = place.pool, place.pool.owners.pop()
        if last != row:
            length = int(self._lengths[last])
            with torch.inference_mode():
                pool.block(place.slot, length)[:] = pool.block(len(pool.owners), length)
            pool.owners[place.slot] = last
            self._slots[last].slot = place.slot


class KeyValuePool:
    """Sequences of about one length: one tensor, a slot for each. The number of slots grows by doubling."""

    def __init__(self, shape: CacheShape, capacity: int, slots: int = 0) -> None:
        """`capacity` is L."""
        self.shape = shape
        self.capacity = capacity
        self.owners: list[int] = []
        """The row that has each slot, as far as slots were taken; `NOBODY` where it left."""
        self._left: list[int] = []
        """The slots of rows that left."""
        self.data = shape.zeros(slots, capacity)
        """[layers,slots,2K,L,E]"""
        self.flat, self._starts = self._views()
        """Each layer as [slots*2K*L,E], and where in it each head of each slot begins."""

    @property
    def slots(self) -> int:
        return int(self.data.shape[1])

    @property
    def rows(self) -> int:
        """How many have a slot."""
        return len(self.owners) - len(self._left)

    def take(self, row: int) -> int:
        """A slot for a row, where there is room for it."""
        if self._left:
            slot = self._left.pop()
            self.owners[slot] = row
        else:
            slot = len(self.owners)
            self.owners.append(row)
        return slot

    def free(self, slot: int) -> None:
        self.owners[slot] = NOBODY
        self._left.append(slot)

    def reserve(self, slots: int) -> bool:
        """Make room for that many; return whether the pool had to grow."""
        if slots <= self.slots:
            return False
        new = self.shape.zeros(max(slots, 2 * self.slots, _FIRST_POSITIONS // self.capacity), self.capacity)
        new[:, : self.slots] = self.data
        self.data = new
        self.flat, self._starts = self._views()
        return True

    def places(self, slots: Tensor | slice, positions: Tensor) -> Tensor:
        """Where keys, then values, of tokens go, as indices [T*2K] of `flat`; both arguments are on its device."""
        return (self._starts[slots] + positions[:, None]).flatten()

    def read(self, first: int, end: int, length: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [slots,K,length-start,E] of neighbouring slots, for each layer."""
        part = self.data[:, first:end, :, start:length]
        keys, values = torch.split_with_sizes(part, (self.shape.heads, self.shape.heads), dim=2)
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def block(self, slot: int, length: int) -> Tensor:
        """The first positions of a slot [layers,2K,length,E]."""
        return self.data[:, slot, :, :length]

    def _views(self) -> tuple[list[Tensor], Tensor]:
        self.address = self.data.data_ptr()
        self.layer_floats, self.slot_floats, self.head_floats = self.data.stride()[:3]
        slots, heads = self.data.shape[1:3]
        starts = torch.arange(slots * heads, device=self.shape.device).view(slots, heads) * self.capacity
        return [layer.flatten(0, 2) for layer in self.data.unbind(0)], starts


@dataclass
class CacheSlot:
    pool: KeyValuePool
    slot: int


def _longer(column: Array, length: int) -> Array:
    return np.concatenate((column, np.zeros(length - len(column), dtype=column.dtype)))
