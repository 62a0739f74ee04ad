"""The tokens of a step in the order in which they are computed: pool by pool, running sequences before pieces.

In each pool the running sequences own the first slots, so a decode step reads contiguous blocks. Which order that is
shows outside only as `asked`: the logits come in the order of rows, then of pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.engine.inference.attention import CachedAttention, Chunk, SharedStart, decode_runs
from areal.engine.inference.kv_cache import KeyValueCache, KeyValuePool
from areal.engine.inference.model_runner import Piece


@dataclass(frozen=True)
class StepLayout:
    ids: Tensor
    positions: Tensor
    asked: Tensor | None
    """Tokens whose logits are wanted; None = all."""
    parts: list[tuple[slice, CachedAttention]]
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
    shared: Sequence[SharedStart],
) -> StepLayout:
    """`ids` at `positions` are the next tokens of the first rows, which will have `lengths`; there is room for all."""
    pools, batch = cache.pools, ids.shape[0]
    if not pieces and len(pools) == 1 and pools[0].owners == (rows := [*range(batch)]):
        shared = _among(rows, shared)
        attention = CachedAttention(
            pools[0],
            pools[0].places(slice(0, batch), positions),
            decode_runs(positions, lengths, shared),
            [],
            shared,
        )
        return StepLayout(ids, positions, None, [(slice(0, batch), attention)])
    layout = _Layout(ids, positions)
    for pool in pools:
        layout.add(pool, [row for row in pool.owners if row < batch], _in_pool(cache, pool, pieces), shared)
    layout.add(cache.stage, [], [(number, 0, piece) for number, piece in enumerate(pieces) if not piece.last], ())
    return layout.finish([number for number, piece in enumerate(pieces) if piece.last])


_Placed = tuple[int, int, Piece]
"""The number of a piece in its step, its slot, and the piece."""


def _in_pool(cache: KeyValueCache, pool: KeyValuePool, pieces: Sequence[Piece]) -> list[_Placed]:
    """Pieces that complete a prompt there; those that begin prompts of one length stand together."""
    homes = [(number, cache.home(piece.rows[0]), piece) for number, piece in enumerate(pieces) if piece.last]
    here = [(number, home.slot, piece) for number, home, piece in homes if home.pool is pool]
    return sorted(here, key=lambda placed: (placed[2].start, placed[2].end))


def _among(rows: list[int], shared: Sequence[SharedStart]) -> list[SharedStart]:
    return [start for start in (one.among(rows) for one in shared) if start is not None]


class _Layout:
    """Tokens that have been laid out so far."""

    def __init__(self, ids: Tensor, positions: Tensor) -> None:
        self._ids, self._positions = ids.tolist(), positions.tolist()
        self._new_ids: list[int] = []
        self._new_positions: list[int] = []
        self._row_tokens = [0] * len(self._ids)
        """Where the token of each row is."""
        self._ends: dict[int, int] = {}
        """Where the last token of each piece is, by its number."""
        self._parts: list[tuple[slice, CachedAttention]] = []

    def add(
        self, pool: KeyValuePool, rows: list[int], pieces: Sequence[_Placed], shared: Sequence[SharedStart]
    ) -> None:
        """The rows have the first slots of the pool."""
        begin = len(self._new_ids)
        slots = [*range(len(rows))]
        for slot, row in enumerate(rows):
            self._row_tokens[row] = begin + slot
        self._new_ids += [self._ids[row] for row in rows]
        self._new_positions += [self._positions[row] for row in rows]
        chunks: list[Chunk] = []
        for number, slot, piece in pieces:
            self._new_ids += piece.ids[piece.start : piece.end]
            self._new_positions += range(piece.start, piece.end)
            slots += [slot] * (piece.end - piece.start)
            self._ends[number] = len(self._new_ids) - 1
            chunk = Chunk(slot, piece.start, piece.end)
            if chunks and chunks[-1].joins(chunk):
                chunks[-1].count += 1
            else:
                chunks.append(chunk)
        if not slots:
            return
        at = torch.tensor(self._new_positions[begin:])
        here = _among(rows, shared)
        lengths = [place + 1 for place in self._new_positions[begin : begin + len(rows)]]
        runs = decode_runs(at[: len(rows)], lengths, here)
        attention = CachedAttention(pool, pool.places(torch.tensor(slots), at), runs, chunks, here)
        self._parts.append((slice(begin, len(self._new_ids)), attention))

    def finish(self, complete: list[int]) -> StepLayout:
        """`complete` are the numbers of the pieces whose logits are asked for."""
        asked = self._row_tokens + [self._ends[number] for number in complete]
        return StepLayout(
            torch.tensor(self._new_ids),
            torch.tensor(self._new_positions),
            torch.tensor(asked, dtype=torch.int64),
            self._parts,
        )
