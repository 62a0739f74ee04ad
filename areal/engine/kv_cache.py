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
        self.rows, self.length = 0, 0
        self._replace(torch.zeros(layers, 2, 1, heads, 0, head_dim, dtype=dtype))

    def reserve(self, rows: int, length: int) -> None:
        """Room for that many rows and positions."""
        if rows <= self.rows and length <= self.length:
            return
        old = self.data
        rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows, 8)
        length = self.length if length <= self.length else min(max(length, 2 * self.length, 64), self._max_positions)
        layers, pair, _, heads, _, head_dim = old.shape
        new = old.new_zeros(layers, pair, rows + 1, heads, length, head_dim)
        new[:, :, : self.rows, :, : self.length] = old[:, :, :-1]
        new[:, :, STAGE, :, : self.length] = old[:, :, STAGE]
        self.rows, self.length = rows, length
        self._replace(new)

    def places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where the keys and values of tokens go, as indices [T*K] of `flat_keys` and `flat_values`."""
        heads = torch.arange(self.data.shape[3])
        first = (rows % (self.rows + 1) * len(heads))[:, None] + heads
        return (first * self.length + positions[:, None]).flatten()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """The first `length` positions of a row into others."""
        for target in targets:
            self.block(target, length)[:] = self.block(source, length)

    def block(self, row: int, length: int) -> Tensor:
        """The first positions of a row [layers, 2, K, length, E]."""
        return self.data[:, :, row, :, :length]

    def _replace(self, data: Tensor) -> None:
        self.data = data
        layers = [layer.unbind(0) for layer in data.unbind(0)]
        self.keys = [keys for keys, _ in layers]
        self.values = [values for _, values in layers]
        self.flat_keys = [keys.flatten(0, 2) for keys in self.keys]
        self.flat_values = [values.flatten(0, 2) for values in self.values]
