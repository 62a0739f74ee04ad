"""Keys and values of sequences of about one length: one tensor, a slot for each.

Slots are dense: the sequences in it own the first ones. Its number of slots grows by doubling.
Shapes: L positions that a slot has room for, K key-value heads, E head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
