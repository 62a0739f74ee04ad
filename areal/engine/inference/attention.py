"""Attention of one step over the cache: the order in which its tokens are computed, and what each of them reads.

Tokens go pool by pool, running sequences before pieces of prompts. In each pool the running sequences own the first
slots, so a decode step reads contiguous blocks. Outside this file the order shows only as `StepLayout.wanted`: logits
come in the order of rows, then of pieces.

Neighbouring slots are read together up to the longest of them, but only where that costs less than another call: one
long conversation must not make all others read its length. A prefix that several rows share is read once, from one of
them; then each reads the rest of its own row, and the two parts are joined by their weights.

A step is laid out on the host, and its tensors are sent to the device of the cache.

Shapes as in model/decoder.py; G queries share a key-value head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.messages import Array
from areal.engine.inference.kv_cache import KeyValueCache, KeyValuePool
from areal.engine.inference.model_runner import Piece
from areal.engine.model.device import to_device

CALL_POSITIONS = 128
"""A call of attention costs about as much as reading this many positions of a row."""
LEAST_SAVED = 4 * CALL_POSITIONS
"""Positions that sharing a prefix must save: fewer cost less than joining the two parts does."""


@dataclass(frozen=True)
class SharedPrefix:
    """Rows whose first `length` tokens are equal."""

    rows: list[int]
    length: int

    @property
    def pays(self) -> bool:
        return (len(self.rows) - 1) * self.length >= LEAST_SAVED

    def among(self, rows: list[int]) -> "SharedPrefix | None":
        """The same for those of its rows that are in `rows`, by their indices there; None if it does not pay.

        Rows without the prefix may lie between, and each stretch of rows with it is a call.
        """
        members = set(self.rows)
        places = [place for place, row in enumerate(rows) if row in members]
        cuts = sum(after - before > 1 for before, after in pairwise(places))
        saved = (len(places) - 1) * self.length - 2 * cuts * CALL_POSITIONS
        return SharedPrefix(places, self.length) if saved >= LEAST_SAVED else None


class SharedPrefixes:
    """Finds rows that begin alike: samples of a group, conversations with one system prompt.

    Rows are compared by the tokens they were filled with: prompts, or whole sequences after a weight swap.
    """

    def __init__(self, shortest: int) -> None:
        """Prefixes of fewer than `shortest` tokens are not looked for."""
        self._shortest = shortest
        self._filled: dict[int, Array] = {}
        self._found: tuple[int, list[SharedPrefix]] | None = None

    def fill(self, row: int, ids: Sequence[int]) -> None:
        """The row begins with these tokens now."""
        self._filled[row] = np.array(ids, dtype=np.int64)
        self._found = None

    def move(self, source: int, target: int) -> None:
        self._filled[target] = self._filled[source]
        self._found = None

    def of(self, rows: int) -> list[SharedPrefix]:
        """The prefixes that some of the first `rows` rows share; no row is in two."""
        if self._found is None or self._found[0] != rows:
            self._found = rows, self._search(rows)
        return self._found[1]

    def _search(self, rows: int) -> list[SharedPrefix]:
        """In sorted order rows that begin alike are neighbours; one that would halve the prefix stays out."""
        long_enough = [row for row in range(rows) if len(self._filled[row]) >= self._shortest]
        found: list[SharedPrefix] = []
        members: list[int] = []
        length = 0
        for row in sorted(long_enough, key=lambda row: self._filled[row].tolist()):
            kept = _common(self._filled[members[0]][:length], self._filled[row]) if members else 0
            if members and kept >= max(self._shortest, length // 2):
                members.append(row)
                length = kept
                continue
            found.append(SharedPrefix(members, length))
            members, length = [row], len(self._filled[row])
        found.append(SharedPrefix(members, length))
        return [prefix for prefix in found if prefix.pays]


def _common(one: Array, other: Array) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


@dataclass(frozen=True)
class StepLayout:
    ids: Tensor
    positions: Tensor
    wanted: Tensor | None
    """Tokens whose logits are wanted; None = all."""
    parts: "list[tuple[slice, PoolAttention]]"
    """By pool, each over neighbouring tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0][1].attend(layer, q, k, v)
        return torch.cat([part.attend(layer, q[span], k[span], v[span]) for span, part in self.parts])


def lay_out(
    cache: KeyValueCache,
    ids: Tensor,
    positions: Tensor,
    lengths: list[int],
    pieces: Sequence[Piece],
    shared: Sequence[SharedPrefix],
) -> StepLayout:
    """`ids` at `positions` are the next tokens of the first rows, which will have `lengths`; there is room for all."""
    pools, batch = cache.pools, ids.shape[0]
    if not pieces and len(pools) == 1 and pools[0].owners == (rows := [*range(batch)]):
        ids, positions = to_device(ids, cache.device), to_device(positions, cache.device)
        shared = _among(rows, shared)
        attention = PoolAttention(
            pools[0],
            pools[0].places(slice(0, batch), positions),
            decode_runs(positions, lengths, shared),
            [],
            shared,
        )
        return StepLayout(ids, positions, None, [(slice(0, batch), attention)])
    layout = _LayoutBuilder(ids, positions, cache.device)
    for pool in pools:
        layout.add(pool, [row for row in pool.owners if row < batch], _in_pool(cache, pool, pieces), shared)
    layout.add(cache.partial, [], [(number, 0, piece) for number, piece in enumerate(pieces) if not piece.last], ())
    return layout.build([number for number, piece in enumerate(pieces) if piece.last])


_Placed = tuple[int, int, Piece]
"""The number of a piece in its step, its slot, and the piece."""


def _in_pool(cache: KeyValueCache, pool: KeyValuePool, pieces: Sequence[Piece]) -> list[_Placed]:
    """Pieces that complete a prompt in that pool; whole prompts of one length are neighbours."""
    placed = [(number, cache.slot_of(piece.rows[0]), piece) for number, piece in enumerate(pieces) if piece.last]
    here = [(number, place.slot, piece) for number, place, piece in placed if place.pool is pool]
    return sorted(here, key=lambda placed: (placed[2].start, placed[2].end))


def _among(rows: list[int], shared: Sequence[SharedPrefix]) -> list[SharedPrefix]:
    return [prefix for prefix in (one.among(rows) for one in shared) if prefix is not None]


class _LayoutBuilder:
    def __init__(self, ids: Tensor, positions: Tensor, device: torch.device) -> None:
        self._ids, self._positions = ids.tolist(), positions.tolist()
        self._device = device
        self._new_ids: list[int] = []
        self._new_positions: list[int] = []
        self._row_tokens = [0] * len(self._ids)
        """Where the token of each row is."""
        self._ends: dict[int, int] = {}
        """Where the last token of each piece is, by the piece's number."""
        self._parts: list[tuple[slice, PoolAttention]] = []

    def add(
        self, pool: KeyValuePool, rows: list[int], pieces: Sequence[_Placed], shared: Sequence[SharedPrefix]
    ) -> None:
        """The rows have the first slots of the pool."""
        begin = len(self._new_ids)
        slots = [*range(len(rows))]
        for slot, row in enumerate(rows):
            self._row_tokens[row] = begin + slot
        self._new_ids += [self._ids[row] for row in rows]
        self._new_positions += [self._positions[row] for row in rows]
        chunks: list[_Chunk] = []
        for number, slot, piece in pieces:
            self._new_ids += piece.ids[piece.start : piece.end]
            self._new_positions += range(piece.start, piece.end)
            slots += [slot] * (piece.end - piece.start)
            self._ends[number] = len(self._new_ids) - 1
            chunk = _Chunk(slot, piece.start, piece.end)
            if chunks and chunks[-1].joins(chunk):
                chunks[-1].count += 1
            else:
                chunks.append(chunk)
        if not slots:
            return
        at = self._sent(self._new_positions[begin:])
        here = _among(rows, shared)
        lengths = [place + 1 for place in self._new_positions[begin : begin + len(rows)]]
        runs = decode_runs(at[: len(rows)], lengths, here)
        attention = PoolAttention(pool, pool.places(self._sent(slots), at), runs, chunks, here)
        self._parts.append((slice(begin, len(self._new_ids)), attention))

    def build(self, complete: list[int]) -> StepLayout:
        """`complete` are the numbers of the pieces whose logits are wanted."""
        wanted = self._row_tokens + [self._ends[number] for number in complete]
        ids, positions = self._sent(self._new_ids), self._sent(self._new_positions)
        return StepLayout(ids, positions, self._sent(wanted), self._parts)

    def _sent(self, numbers: list[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._device)


@dataclass
class _Run:
    """Neighbouring slots whose caches are read from `start` up to `length`."""

    first: int
    end: int
    length: int
    start: int = 0
    mask: Tensor | None = None
    """[slots,1,1,length-start], 0 or -inf; None = all are that long."""


def decode_runs(positions: Tensor, lengths: Sequence[int], shared: Sequence[SharedPrefix] = ()) -> list[_Run]:
    """The slots of running sequences, cut where reading them apart is cheaper; shared prefixes are left out."""
    starts = [0] * len(lengths)
    for prefix in shared:
        for row in prefix.rows:
            starts[row] = prefix.length
    runs = []
    for first, end, length in _cuts(lengths, starts):
        run = _Run(first, end, length, starts[first])
        if min(lengths[first:end]) < length:
            later = torch.arange(run.start, length, device=positions.device) > positions[first:end, None]
            mask = torch.zeros(later.shape, device=positions.device)
            run.mask = mask.masked_fill_(later, -torch.inf)[:, None, None]
        runs.append(run)
    return runs


def _cuts(lengths: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first slot, end, longest) of each run; the slots of one have the same start."""
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


@dataclass
class _Chunk:
    """The positions `start` to `end` of a slot; `count` such chunks follow each other if they begin at 0."""

    slot: int
    start: int
    end: int
    count: int = 1

    def joins(self, other: "_Chunk") -> bool:
        return self.start == other.start == 0 and self.end == other.end

    @property
    def tokens(self) -> int:
        return (self.end - self.start) * self.count

    def past(self, pool: KeyValuePool) -> list[tuple[Tensor, Tensor]] | None:
        """Keys and values of the slot up to `end`, for each layer; None if nothing precedes the chunk."""
        return None if self.start == 0 else pool.read(self.slot, self.slot + 1, self.end)

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """[new,end], 0 or -inf; None where the chunk is plainly causal."""
        if self.start == 0:
            return None
        places = torch.arange(self.end, device=device)
        later = places > places[self.start :, None]
        return torch.zeros(later.shape, dtype=dtype, device=device).masked_fill_(later, -torch.inf)


class PoolAttention:
    """Attention of a step's tokens in one pool."""

    def __init__(
        self,
        pool: KeyValuePool,
        places: Tensor,
        runs: list[_Run],
        chunks: list[_Chunk],
        shared: Sequence[SharedPrefix] = (),
    ) -> None:
        """Keys and values of the tokens go to `places`; `runs` leave out the positions that `shared` covers."""
        self._pool, self._places = pool, places
        dtype, device = pool.shape.dtype, pool.shape.device
        self._attention = _cpu_attention if device.type == "cpu" else _plain_attention if shared else _fused_attention
        for run in runs:
            run.mask = None if run.mask is None else run.mask.to(dtype)
        self._runs = [(run, pool.read(run.first, run.end, run.length, run.start)) for run in runs]
        self._chunks = [(chunk, chunk.mask(dtype, device), chunk.past(pool)) for chunk in chunks]
        self._shared = [
            (to_device(torch.tensor(prefix.rows), device), pool.read(prefix.rows[0], prefix.rows[0] + 1, prefix.length))
            for prefix in shared
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
        """[B,H,E] of the running sequences, whose queries come first."""
        parts = [self._attention(q[run.first : run.end], *caches[layer], run.mask) for run, caches in self._runs]
        mixed = _joined([part for part, _ in parts])
        if self._shared:
            weights = _joined([weight for _, weight in parts]).flatten(1, 2)
            for rows, caches in self._shared:
                self._join_prefix(mixed, weights, rows, q[rows], *caches[layer])
        return mixed

    def _join_prefix(
        self, mixed: Tensor, weights: Tensor, rows: Tensor, q: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Add attention to these keys [1,K,L,E] to `rows` of `mixed`, which attended to their own positions only."""
        heads, size = keys.shape[1], keys.shape[3]
        by_head = q.unflatten(1, (heads, -1)).transpose(0, 1)  # K, rows, G, E
        prefix, weight = self._attention(by_head.reshape(1, -1, size), keys, values, None)
        prefix = prefix.view(by_head.shape).transpose(0, 1).flatten(1, 2)
        weight = weight.view(by_head.shape[:3]).transpose(0, 1).flatten(1, 2)
        share = (weight - weights[rows]).sigmoid_().unsqueeze(-1).to(mixed.dtype)
        mixed[rows] = torch.lerp(mixed[rows], prefix, share)


def _cpu_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[rows,H,E], and the logarithm [rows,K,G] of the sum of the exponentials that it was divided by."""
    rows, heads, _, size = keys.shape
    # The queries that share a key-value head are the rows of one product. This is what scaled_dot_product_attention
    # calls on a CPU; that function does not return the second result.
    mixed, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.view(rows, heads, -1, size), keys, values, attn_mask=mask
    )
    return mixed.flatten(1, 2), weight


def _plain_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same on any device."""
    rows, heads, _, size = keys.shape
    scores = (q.view(rows, heads, -1, size) @ keys.transpose(2, 3)).float() * size**-0.5
    if mask is not None:
        scores = scores + mask
    weight = scores.logsumexp(dim=-1)
    mixed = (scores - weight.unsqueeze(-1)).exp().to(values.dtype) @ values
    return mixed.flatten(1, 2), weight


def _fused_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same by the device's own kernel, which does not give the second result: it is empty."""
    rows, heads, _, size = keys.shape
    mixed = F.scaled_dot_product_attention(q.view(rows, heads, -1, size), keys, values, attn_mask=mask)
    return mixed.flatten(1, 2), mixed.new_empty(0)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill(count: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`count` chunks of one length; without a mask each begins its prompt, and k and v are its own."""
    q = q.unflatten(0, (count, -1)).transpose(1, 2)
    if mask is None:
        k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)
