"""Keys and values of running sequences, a row each, in the shape that transformers models write to and read from.

Row i belongs to the i-th running sequence. A decode step writes at each row's own position; what lies behind it is
hidden by the step's mask. The slots grow by doubling and never shrink.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

Pair = tuple[Tensor, Tensor]


class SlottedCache(Cache):
    def __init__(self) -> None:
        super().__init__(layers=[])
        self._slots: list[Pair] = []
        """Keys and values of each layer [rows, heads, length, dimension]."""
        self._places = torch.empty(0, dtype=torch.long)
        self._length = 0

    def fill(self, rows: Sequence[int], sources: Sequence[int], filled: Cache) -> None:
        """Take the keys and values of a prefill: row `rows[i]` gets its sequence `sources[i]`."""
        for index, layer in enumerate(filled.layers):
            for slot, new in zip(self._slot(index, layer, max(rows) + 1), (layer.keys, layer.values), strict=True):
                slot[list(rows), :, : new.shape[2]] = new[list(sources)]

    def begin(self, positions: Sequence[int]) -> Tensor:
        """A decode step of the first B rows at `positions`; returns its additive mask [B,1,1,L]."""
        self._places, self._length = torch.tensor(positions), max(positions) + 1
        self._slots = [_grown(pair, len(positions), self._length) for pair in self._slots]
        hidden = torch.arange(self._length) > self._places[:, None]
        mask = torch.zeros(len(positions), 1, 1, self._length)
        return mask.masked_fill_(hidden[:, None, None], torch.finfo(torch.float32).min)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        keys, values = self._slots[layer_idx]
        batch = len(self._places)
        rows = torch.arange(batch)
        keys[rows, :, self._places] = key_states[:, :, 0]
        values[rows, :, self._places] = value_states[:, :, 0]
        return keys[:batch, :, : self._length], values[:batch, :, : self._length]

    @torch.no_grad()
    def move(self, source: int, target: int, length: int) -> None:
        for slot in (slot for pair in self._slots for slot in pair):
            slot[target, :, :length] = slot[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0

    def _slot(self, index: int, layer: Any, rows: int) -> Pair:
        if index == len(self._slots):
            self._slots.append((_nothing(layer.keys), _nothing(layer.values)))
        self._slots[index] = _grown(self._slots[index], rows, layer.keys.shape[2])
        return self._slots[index]


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, like.shape[1], 0, like.shape[3])


def _grown(pair: Pair, rows: int, length: int) -> Pair:
    keys, values = pair
    if rows <= keys.shape[0] and length <= keys.shape[2]:
        return pair
    rows = keys.shape[0] if rows <= keys.shape[0] else max(rows, 2 * keys.shape[0], 8)
    length = keys.shape[2] if length <= keys.shape[2] else max(length, 2 * keys.shape[2], 64)
    return _copied(keys, rows, length), _copied(values, rows, length)


def _copied(old: Tensor, rows: int, length: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
