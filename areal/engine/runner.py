"""The decoder with a key-value cache: prompts, whole or in pieces, and running sequences in; next-token logits out.

The i-th running sequence owns cache row i, so a decode step reads contiguous blocks. What depends on the weights (their
faster layouts, remembered prefixes) is made again when the buffer of the weights has been written to.
Shapes: B running sequences, T tokens of a step; the rest as in decoder.py.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.errors import RequestError
from areal.engine.cached_attention import CachedAttention, Chunk, decode_runs
from areal.engine.decoder import Decoder
from areal.engine.kv_cache import STAGE, KeyValueCache
from areal.engine.matrices import Matrices
from areal.engine.model_runner import Piece
from areal.engine.prefix_tree import TOKEN_DIM, PrefixTree
from areal.engine.shared_rows import SharedRows

PASS_TOKENS = 16384
"""Prompt tokens computed at once: bounds memory when many requests join together."""
CHUNK_FLOPS = 8e10
"""About half a second on two slow cores: what a prompt may add to a step that others wait for."""
SMALLEST_CHUNK = 256
"""Tokens from which matrix products are efficient."""
ONE_THREAD_FLOPS = 1e8
"""Steps smaller than this lose more by waking other threads than these can save."""
MEMORY_THREADS = 2
"""So few threads read memory no faster than one, and a single token costs little but reading the weights."""
SHORTEST_PREFIX = 64
"""Tokens: to look for less costs more than to compute it again."""
PREFIX_MEMORY_SHARE = 0.1
"""Of the machine's memory, for prefixes that are remembered."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class _Order:
    """The tokens of a step in the order in which they are computed."""

    ids: Tensor
    positions: Tensor
    places: Tensor
    """Where each goes in the cache."""
    chunks: list[Chunk]
    asked: Tensor | None
    """Tokens whose logits are wanted; None = all."""


class Runner:
    """Implements `ModelRunner` and `MixedRunner`."""

    shortest_prefix = SHORTEST_PREFIX

    def __init__(
        self, decoder: Decoder, *, dtype: torch.dtype = torch.float32, prefix_bytes: int | None = None
    ) -> None:
        """Compute in `dtype`; remembered prefixes take `prefix_bytes` at most (None = a tenth of memory, 0 = none shared)."""
        self.decoder = decoder
        a = self._architecture = decoder.architecture
        self._computing = decoder if dtype == decoder.flat.dtype else Decoder(a, decoder.flat.to(dtype))
        self._cache = KeyValueCache(a.num_layers, a.num_kv_heads, a.head_dim, a.max_positions, dtype)
        self._matrices = Matrices([p for p in self._computing.parameters.values() if p.dim() > 1])
        if prefix_bytes is None:
            prefix_bytes = int(PREFIX_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self._prefixes = PrefixTree(prefix_bytes)
        self._shared = SharedRows(SHORTEST_PREFIX)
        self._seen_version = -1
        size = decoder.flat.numel()
        self.chunk_tokens = int(min(max(CHUNK_FLOPS / (2 * size), SMALLEST_CHUNK), PASS_TOKENS))

    @property
    def flat(self) -> Tensor:
        return self.decoder.flat

    @property
    def max_positions(self) -> int:
        return self._architecture.max_positions

    @property
    def vocab_size(self) -> int:
        return self._architecture.vocab_size

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        if images:
            raise RequestError("the model sees no pictures, got a request with some; use a vision-language model")

    @torch.inference_mode()
    def prefill(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] = ()
    ) -> Tensor:
        """Fill cache rows with prompts, equal ones computed once; return the logits [B,V] after each."""
        homes: dict[Prompt, list[int]] = defaultdict(list)
        for row, prompt in zip(rows, prompts, strict=True):
            homes[tuple(prompt)].append(row)
        none = torch.empty(0, dtype=torch.int64)
        passes = [[Piece(homes[prompt], list(prompt), 0, len(prompt)) for prompt in part] for part in _passes(homes)]
        logits = torch.cat([self.forward(none, none, pieces) for pieces in passes])
        place = {prompt: i for i, prompt in enumerate(homes)}
        return logits[[place[tuple(prompt)] for prompt in prompts]]

    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        return self.forward(torch.tensor(ids), torch.tensor(positions), ())

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        self._refresh()
        batch, lengths = len(ids), [place + 1 for place in positions.tolist()]
        self._cache.reserve(
            max((batch, *(row + 1 for piece in pieces for row in piece.rows))),
            max((*lengths, *(piece.end for piece in pieces))),
        )
        for piece in pieces:
            if piece.start:
                self._fetch_beginning(piece)
        order = self._order(ids, positions, pieces)
        shared = self._shared.starts(batch) if self._prefixes.budget_bytes else []
        runs = decode_runs(positions, lengths, shared)
        attention = CachedAttention(self._cache, order.places, runs, order.chunks, shared)
        with self._threads(len(order.ids)):
            logits = self._compute(order, attention)
        for piece in pieces:
            if piece.last:
                self._settle(piece)
        return logits.float()

    def _compute(self, order: _Order, attention: CachedAttention) -> Tensor:
        linear = self._matrices.linear
        hidden = self._computing.hidden(order.ids, order.positions, attention.attend, linear)
        return self._computing.logits(hidden if order.asked is None else hidden[order.asked], linear)

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        """One thread for a small step, all of them for another."""
        before = torch.get_num_threads()
        small = 2 * tokens * self.decoder.flat.numel() < ONE_THREAD_FLOPS
        reads = tokens == 1 and before <= MEMORY_THREADS
        torch.set_num_threads(1 if small or reads else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Let the sequence in row `source` live in row `target`."""
        self._cache.copy(source, [target], length)
        self._shared.move(source, target)

    def known(self, ids: list[int]) -> int:
        if len(ids) <= SHORTEST_PREFIX or not self._prefixes.budget_bytes:
            return 0
        self._refresh()
        count = sum(block.shape[TOKEN_DIM] for block in self._prefixes.find(ids[:-1]))
        return count if count >= SHORTEST_PREFIX else 0

    @torch.inference_mode()
    def remember(self, row: int, ids: list[int]) -> None:
        if len(ids) >= SHORTEST_PREFIX and self._prefixes.budget_bytes:
            self._prefixes.add(ids, self._cache.block(row, len(ids)))

    def _refresh(self) -> None:
        version = self.decoder.flat._version
        if version == self._seen_version:
            return
        if self._computing is not self.decoder:
            self._computing.flat.copy_(self.decoder.flat)
        self._matrices.refresh()
        self._prefixes.clear()
        self._seen_version = version

    def _fetch_beginning(self, piece: Piece) -> None:
        """Put the tokens before a piece into the row that it is computed in."""
        row = _row(piece)
        if not piece.staged:
            blocks = self._prefixes.find(piece.ids[: piece.start])
            self._cache.block(row, piece.start)[:] = torch.cat(blocks, dim=TOKEN_DIM)
        elif row != STAGE:  # leaves the stage to the prompt after it
            self._cache.copy(STAGE, [row], piece.start)

    def _settle(self, piece: Piece) -> None:
        """A complete prompt goes to all of its rows, and may begin a later one."""
        first, *others = piece.rows
        self._cache.copy(first, others, len(piece.ids))
        for row in piece.rows:
            self._shared.fill(row, piece.ids)
        self.remember(first, piece.ids)

    def _order(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> _Order:
        """Running sequences first, then pieces; those that begin prompts of one length stand together."""
        batch = len(ids)
        if not pieces:
            return _Order(ids, positions, self._cache.places(slice(0, batch), positions), [], None)
        new_ids: list[int] = []
        new_positions: list[int] = []
        rows: list[int] = [*range(batch)]
        chunks: list[Chunk] = []
        ends = [0] * len(pieces)
        for i in sorted(range(len(pieces)), key=lambda i: (pieces[i].start, pieces[i].end)):
            piece, row = pieces[i], _row(pieces[i])
            new_ids += piece.ids[piece.start : piece.end]
            new_positions += range(piece.start, piece.end)
            rows += [row] * (piece.end - piece.start)
            ends[i] = len(rows) - 1
            chunk = Chunk(row, piece.start, piece.end)
            if chunks and chunks[-1].joins(chunk):
                chunks[-1].count += 1
            else:
                chunks.append(chunk)
        asked = [*range(batch), *(end for end, piece in zip(ends, pieces, strict=True) if piece.last)]
        at = torch.cat((positions, torch.tensor(new_positions)))
        return _Order(
            torch.cat((ids, torch.tensor(new_ids))),
            at,
            self._cache.places(torch.tensor(rows), at),
            chunks,
            torch.tensor(asked, dtype=torch.int64),
        )


def _row(piece: Piece) -> int:
    """The cache row that a piece is computed in."""
    return piece.rows[0] if piece.last else STAGE


def _passes(prompts: "dict[Prompt, list[int]]") -> Iterator[list[Prompt]]:
    """Neighbours, of at most PASS_TOKENS tokens together."""
    part: list[Prompt] = []
    tokens = 0
    for prompt in prompts:
        if part and tokens + len(prompt) > PASS_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(prompt)
        tokens += len(prompt)
    yield part
