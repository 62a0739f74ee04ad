"""Keys and values that transformers models keep of the tokens they have seen, for sequences that come and go."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from areal.engine.model.device import to_device

_Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer [rows, heads, length, dimension]."""


class RowCache(Cache):
    """Keys and values of running sequences, a row each, as transformers models write and read them.

    A decode step writes at each row's own position; what follows it in the row is hidden by the step's mask. Rows grow
    by doubling and never shrink.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self._device = device
        self._pairs: list[_Pair] = []
        self._places = torch.empty(0, dtype=torch.long, device=device)
        self._length = 0

    def fill(self, rows: Sequence[int], sources: Sequence[int], filled: Cache) -> None:
        """Take the keys and values of a prefill: row `rows[i]` gets its sequence `sources[i]`."""
        targets, taken = (to_device(torch.tensor(each), self._device) for each in (rows, sources))
        for index, layer in enumerate(filled.layers):
            if index == len(self._pairs):
                self._pairs.append((_nothing(layer.keys), _nothing(layer.values)))
            pair = self._pairs[index] = _grown(self._pairs[index], max(rows) + 1, layer.keys.shape[2])
            for held, new in zip(pair, (layer.keys, layer.values), strict=True):
                held[targets, :, : new.shape[2]] = new[taken]

    def begin(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A decode step of the first B rows at `positions`; returns its additive mask [B,1,1,L], and `positions`."""
        self._places, self._length = to_device(torch.tensor(positions), self._device), max(positions) + 1
        self._pairs = [_grown(pair, len(positions), self._length) for pair in self._pairs]
        hidden = torch.arange(self._length, device=self._device) > self._places[:, None]
        mask = torch.zeros(len(positions), 1, 1, self._length, device=self._device)
        return mask.masked_fill_(hidden[:, None, None], torch.finfo(torch.float32).min), self._places

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> _Pair:
        keys, values = self._pairs[layer_idx]
        batch = len(self._places)
        rows = torch.arange(batch, device=self._device)
        keys[rows, :, self._places] = key_states[:, :, 0]
        values[rows, :, self._places] = value_states[:, :, 0]
        return keys[:batch, :, : self._length], values[:batch, :, : self._length]

    @torch.no_grad()
    def move(self, source: int, target: int, length: int) -> None:
        for held in (tensor for pair in self._pairs for tensor in pair):
            held[target, :, :length] = held[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0, like.shape[1], 0, like.shape[3])


def _grown(pair: _Pair, rows: int, length: int) -> _Pair:
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
