"""Which running sequences begin alike: their common tokens are read once for all of them, not once for each.

Rows are compared by what they were filled with (prompts, or whole sequences after a weight swap), whoever asked for
them: the samples of a group, conversations with one system prompt.
"""

# MERGED-DOC
# Attention of a step in one pool: running sequences over their slots, pieces of prompts over what precedes them.
#
# A row here is a slot of the pool. Neighbouring rows are read together up to the longest of them, but only where that
# costs less than another call: one long conversation must not make everybody read its length. What several rows begin
# with is read once, from one of them; then each reads the rest of its own row, and the two parts are joined by their
# weights.
# Shapes as in decoder.py; G queries share a key-value head.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.messages import Array
from areal.engine.inference.kv_cache import KeyValuePool

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


@dataclass
class Run:
    """Neighbouring rows whose caches are read from `start` up to `length`."""

    first: int
    end: int
    length: int
    start: int = 0
    mask: Tensor | None = None
    """[rows,1,1,length-start], 0 or -inf; None = all are that long."""


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

    def past(self, pool: KeyValuePool) -> list[tuple[Tensor, Tensor]] | None:
        """Keys and values of the row up to `end`, for each layer; None if there is nothing before the piece."""
        return None if self.start == 0 else pool.read(self.row, self.row + 1, self.end)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[new,end], 0 or -inf; None where plain causality says it all."""
        if self.start == 0:
            return None
        later = torch.arange(self.end) > torch.arange(self.start, self.end)[:, None]
        return torch.zeros(later.shape, dtype=dtype).masked_fill_(later, -torch.inf)


class CachedAttention:
    """Attention of one step; `places` says where the tokens' keys and values go in the cache."""

    def __init__(
        self,
        pool: KeyValuePool,
        places: Tensor,
        runs: list[Run],
        chunks: list[Chunk],
        shared: Sequence[SharedStart] = (),
    ) -> None:
        """`runs` leave out the positions that `shared` covers."""
        self._pool, self._places = pool, places
        dtype = pool.shape.dtype
        for run in runs:
            run.mask = None if run.mask is None else run.mask.to(dtype)
        self._runs = [(run, pool.read(run.first, run.end, run.length, run.start)) for run in runs]
        self._chunks = [(chunk, chunk.mask(dtype), chunk.past(pool)) for chunk in chunks]
        self._shared = [
            (torch.tensor(start.rows), pool.read(start.rows[0], start.rows[0] + 1, start.length)) for start in shared
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = torch.cat((k, v), dim=1)
        self._pool.flat[layer].index_copy_(0, self._places, new.view(-1, new.shape[2]))
        outputs, at = [], 0
        if self._runs:
            outputs.append(self._decode(layer, q))
            at = len(outputs[0])
        for chunk, mask, past in self._chunks:
            part = slice(at, at + chunk.tokens)
            known = (k[part], v[part]) if past is None else past[layer]
            outputs.append(_prefill(chunk.count, q[part], *known, mask))
            at = part.stop
        return _joined(outputs)

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        """[B,H,E]: the running sequences come first."""
        parts = [_attention(q[run.first : run.end], *caches[layer], run.mask) for run, caches in self._runs]
        mixed = _joined([part for part, _ in parts])
        if self._shared:
            weights = _joined([weight for _, weight in parts]).flatten(1, 2)
            for rows, caches in self._shared:
                _join_start(mixed, weights, rows, q[rows], *caches[layer])
        return mixed


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[rows,H,E], and the logarithm [rows,K,G] of the sum of the exponentials that it was divided by."""
    rows, heads, _, size = keys.shape
    # The queries that share a key-value head stand as rows of one product. This is what scaled_dot_product_attention
    # calls on a processor; it does not hand out the second result.
    mixed, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.view(rows, heads, -1, size), keys, values, attn_mask=mask
    )
    return mixed.flatten(1, 2), weight


def _join_start(mixed: Tensor, weights: Tensor, rows: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> None:
    """Let `rows` of `mixed`, which saw only their own positions, have seen these keys [1,K,L,E] too."""
    heads, size = keys.shape[1], keys.shape[3]
    by_head = q.unflatten(1, (heads, -1)).transpose(0, 1)  # K, rows, G, E
    start, weight = _attention(by_head.reshape(1, -1, size), keys, values, None)
    start = start.view(by_head.shape).transpose(0, 1).flatten(1, 2)
    weight = weight.view(by_head.shape[:3]).transpose(0, 1).flatten(1, 2)
    share = (weight - weights[rows]).sigmoid_().unsqueeze(-1).to(mixed.dtype)
    mixed[rows] = torch.lerp(mixed[rows], start, share)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill(count: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`count` pieces behind each other; without a mask each begins its prompt, and k and v are its own."""
    q = q.unflatten(0, (count, -1)).transpose(1, 2)
    if mask is None:
        k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)


def decode_runs(positions: Tensor, lengths: Sequence[int], shared: Sequence[SharedStart] = ()) -> list[Run]:
    """Rows cut where reading them apart is cheaper; what is shared is left out."""
    starts = [0] * len(lengths)
    for one in shared:
        for row in one.rows:
            starts[row] = one.length
    runs = []
    for first, end, length in _cuts(lengths, starts):
        run = Run(first, end, length, starts[first])
        if min(lengths[first:end]) < length:
            later = torch.arange(run.start, length) > positions[first:end, None]
            run.mask = torch.zeros(later.shape).masked_fill_(later, -torch.inf)[:, None, None]
        runs.append(run)
    return runs


def _cuts(lengths: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, end, longest) of each run; the rows of one have the same start."""
    if not lengths:
        return []
    alike = not any(starts)
    if alike and len(lengths) * max(lengths) - sum(lengths) <= CALL_POSITIONS:
        return [(0, len(lengths), max(lengths))]
    cuts, first, longest = [], 0, lengths[0]
    for row in range(1, len(lengths)):
        start, length = starts[row], lengths[row]
        together = (max(longest, length) - start) * (row + 1 - first)
        apart = (longest - start) * (row - first) + CALL_POSITIONS + length - start
        if start != starts[first] or together > apart:
            cuts.append((first, row, longest))
            first, longest = row, length
        else:
            longest = max(longest, length)
    return [*cuts, (first, len(lengths), longest)]
