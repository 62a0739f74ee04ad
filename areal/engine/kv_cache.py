"""Keys and values of running sequences: one tensor, a row for each, and a last row for a prompt that is not complete.

It grows by doubling and never shrinks. Shapes: L cached positions, K key-value heads, E head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STAGE = -1
"""The row of the prompt that is not complete."""


class KeyValueCache:
    def __init__(self, layers: int, heads: int, head_dim: int, max_positions: int, dtype: torch.dtype) -> None:
        self._max_positions = max_positions
        self.heads = heads
        self.rows, self.length = 0, 0
        self._replace(torch.zeros(layers, 1, 2 * heads, 0, head_dim, dtype=dtype))

    def reserve(self, rows: int, length: int) -> None:
        """Room for that many rows and positions."""
        if rows <= self.rows and length <= self.length:
            return
        old = self.data
        rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows, 8)
        length = self.length if length <= self.length else min(max(length, 2 * self.length, 64), self._max_positions)
        layers, _, heads, _, head_dim = old.shape
        new = old.new_zeros(layers, rows + 1, heads, length, head_dim)
        new[:, : self.rows, :, : self.length] = old[:, :-1]
        new[:, STAGE, :, : self.length] = old[:, STAGE]
        self.rows, self.length = rows, length
        self._replace(new)

    def places(self, rows: Tensor | slice, positions: Tensor) -> Tensor:
        """Where keys, then values, of tokens go, as indices [T*2K] of `flat`."""
        return (self._starts[rows] + positions[:, None]).flatten()

    def read(self, first: int, end: int, length: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [rows,K,length-start,E] of neighbouring rows, for each layer."""
        layers = self.data[:, first:end, :, start:length].unbind(0)
        return [layer.split(self.heads, dim=1) for layer in layers]  # type: ignore[misc]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """The first `length` positions of a row into others."""
        for target in targets:
            self.block(target, length)[:] = self.block(source, length)

    def block(self, row: int, length: int) -> Tensor:
        """The first positions of a row [layers,2K,length,E]."""
        return self.data[:, row, :, :length]

    def _replace(self, data: Tensor) -> None:
        self.data = data
        self.flat = [layer.flatten(0, 2) for layer in data.unbind(0)]
        """Each layer as [rows*2K*L,E]."""
        rows, heads = data.shape[1:3]
        self._starts = torch.arange(rows * heads).view(rows, heads) * self.length
