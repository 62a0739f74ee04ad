"""Attention of a step: running sequences over their cache rows, pieces of prompts over what precedes them.

Neighbouring rows are read together up to the longest of them, but only where that costs less than another call: one
long conversation must not make everybody read its length.
Shapes as in decoder.py; G queries share a key-value head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.kv_cache import KeyValueCache

CALL_POSITIONS = 128
"""A call costs about as much as reading this many positions of a row."""


@dataclass
class Run:
    """Neighbouring rows whose caches are read up to `length`."""

    first: int
    end: int
    length: int
    mask: Tensor | None = None
    """[rows,1,1,length], 0 or -inf; None = all are that long."""


@dataclass
class Chunk:
    """The positions `start` to `end` of a row; `count` such pieces follow each other if they begin at 0."""

    row: int
    start: int
    end: int
    count: int = 1

    def joins(self, other: "Chunk") -> bool:
        return self.start == other.start == 0 and self.end == other.end

    @property
    def tokens(self) -> int:
        return (self.end - self.start) * self.count

    def past(self, cache: KeyValueCache) -> list[tuple[Tensor, Tensor]] | None:
        """Keys and values of the row up to `end`, for each layer; None if there is nothing before the piece."""
        row = self.row % (cache.rows + 1)
        return None if self.start == 0 else cache.read(row, row + 1, self.end)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[new,end], 0 or -inf; None where plain causality says it all."""
        if self.start == 0:
            return None
        later = torch.arange(self.end) > torch.arange(self.start, self.end)[:, None]
        return torch.zeros(later.shape, dtype=dtype).masked_fill_(later, -torch.inf)


class CachedAttention:
    """Attention of one step; `places` says where the tokens' keys and values go in the cache."""

    def __init__(self, cache: KeyValueCache, places: Tensor, runs: list[Run], chunks: list[Chunk]) -> None:
        self._cache, self._places = cache, places
        dtype = cache.data.dtype
        for run in runs:
            run.mask = None if run.mask is None else run.mask.to(dtype)
        self._runs = [(run, cache.read(run.first, run.end, run.length)) for run in runs]
        self._chunks = [(chunk, chunk.mask(dtype), chunk.past(cache)) for chunk in chunks]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = torch.cat((k, v), dim=1)
        self._cache.flat[layer].index_copy_(0, self._places, new.view(-1, new.shape[2]))
        outputs, at = [], 0
        for run, caches in self._runs:
            outputs.append(_decode(q[run.first : run.end], *caches[layer], run.mask))
            at = run.end
        for chunk, mask, past in self._chunks:
            part = slice(at, at + chunk.tokens)
            known = (k[part], v[part]) if past is None else past[layer]
            outputs.append(_prefill(chunk.count, q[part], *known, mask))
            at = part.stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, _, size = keys.shape
    # The queries that share a key-value head stand as rows of one product.
    mixed = F.scaled_dot_product_attention(q.view(rows, heads, -1, size), keys, values, attn_mask=mask)
    return mixed.flatten(1, 2)


def _prefill(count: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`count` pieces behind each other; without a mask each begins its prompt, and k and v are its own."""
    q = q.unflatten(0, (count, -1)).transpose(1, 2)
    if mask is None:
        k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)


def decode_runs(positions: Tensor, lengths: Sequence[int]) -> list[Run]:
    """Rows cut where reading them apart is cheaper."""
    runs = []
    for first, end, length in _cuts(lengths):
        run = Run(first, end, length)
        if min(lengths[first:end]) < length:
            later = torch.arange(length) > positions[first:end, None]
            run.mask = torch.zeros(end - first, length).masked_fill_(later, -torch.inf)[:, None, None]
        runs.append(run)
    return runs


def _cuts(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, end, longest) of each run."""
    if not lengths:
        return []
    longest = max(lengths)
    if len(lengths) * longest - sum(lengths) <= CALL_POSITIONS:
        return [(0, len(lengths), longest)]
    cuts, first, longest = [], 0, lengths[0]
    for row in range(1, len(lengths)):
        together = max(longest, lengths[row]) * (row + 1 - first)
        if together > longest * (row - first) + CALL_POSITIONS + lengths[row]:
            cuts.append((first, row, longest))
            first, longest = row, lengths[row]
        else:
            longest = max(longest, lengths[row])
    return [*cuts, (first, len(lengths), longest)]
