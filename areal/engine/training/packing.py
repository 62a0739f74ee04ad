"""Sequences that begin alike as a trie: each shared prefix is there once, and a token sees its ancestors."""

# MERGED-DOC
# Lay token sequences behind each other, each shared prefix once.
#
# Sequences of one group often begin alike (the same prompt, the same conversation so far). Sorted, they form a trie whose
# nodes are the tokens to compute; a token sees its ancestors. A bin holds whole tries, and attention never leaves a bin.
# Bins of about one size are computed by one call, the smaller ones filled up; nothing else is padded.
# A sequence that shares too little to pay for the larger bin begins a trie of its own.
# Every position that is asked for is a pair: the node that predicts it, and the token that follows.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.messages import Array

Stretch = tuple[int, int]
"""Nodes from the first number up to the second."""


class TokenTrie:
    """Sequences are added in sorted order, so what one shares with any other it shares with the last."""

    def __init__(self) -> None:
        self.ids: list[Array] = []
        self.depths: list[Array] = []
        self.size = 0
        self.is_plain = True
        """Each sequence goes on where the last one ended: a token sees whatever stands before it."""
        self._blocks: list[list[Stretch]] = []
        """Per sequence: its path, of which the last stretch is new."""
        self._last = np.empty(0, dtype=np.int64)
        self._path = np.empty(0, dtype=np.int64)

    @property
    def longest(self) -> int:
        """Tokens that a sequence has to itself, at most."""
        return max(len(part) for part in self.ids)

    def shared(self, ids: Array) -> int:
        """How many tokens `ids` has in common with the last sequence."""
        length = min(len(ids), len(self._last))
        if length == 0:
            return 0
        differs = ids[:length] != self._last[:length]
        first = int(differs.argmax())
        return first if differs[first] else length

    def add(self, ids: Array, kept: int) -> Array:
        """Add a sequence that shares its first `kept` tokens; return the node of each of its tokens."""
        end = self.size + len(ids) - kept
        self.is_plain = self.is_plain and kept == self.size
        self._path = np.concatenate((self._path[:kept], np.arange(self.size, end)))
        self.ids.append(ids[kept:])
        self.depths.append(np.arange(kept, len(ids)))
        known = _cut(self._blocks[-1], kept) if self._blocks else []
        self._blocks.append([*known, (self.size, end)])
        self._last, self.size = ids, end
        return self._path

    def open(self, mask: Array, triangle: Array) -> None:
        """Write 0 into `mask[size,size]` where a node sees another; `triangle` has -inf above its diagonal, else 0."""
        for *known, (start, end) in self._blocks:
            for first, last in known:
                mask[start:end, first:last] = 0.0
            mask[start:end, start:end] = triangle[: end - start, : end - start]


def _cut(path: list[Stretch], length: int) -> list[Stretch]:
    """The first `length` nodes of a path."""
    kept: list[Stretch] = []
    for start, end in path:
        if length <= 0:
            break
        kept.append((start, min(end, start + length)))
        length -= end - start
    return kept


BIN_TOKENS = 32
"""Small tries share a bin up to this size: fewer bins, at the cost of larger masks."""
PAIRS_PER_TOKEN = 1024
"""A token's matrix products cost about as much as attention between this many pairs of tokens."""
FILLED_SHARE = 7 / 8
"""A bin that fills this much of another's size may be computed beside it."""


@dataclass
class Span:
    """One sequence and the positions whose tokens are to be predicted."""

    ids: Array
    asked: Array
    """Indices into ids, each >= 1, ascending."""
    group: int
    """Sequences of one group share prefixes."""
    images: tuple[bytes, ...] = ()
    """Encoded pictures in the order of their places in ids."""


@dataclass(frozen=True)
class BinRow:
    """Neighbouring bins of one size, which one call computes."""

    count: int
    size: int
    mask: Tensor | None
    """[count,1,size,size], 0 where a token sees another, -inf elsewhere; None = plainly causal."""

    @property
    def tokens(self) -> int:
        return self.count * self.size

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.count, self.size)).transpose(1, 2) for x in (q, k, v))
        causal = self.mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=causal, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)


@dataclass
class Pack:
    """Tokens of one forward pass; `sources[n]` predicts `targets[n]`, the `order[n]`-th position that was asked for."""

    ids: Tensor
    positions: Tensor
    rows: list[BinRow]
    sources: Tensor
    targets: Tensor
    order: Tensor
    tokens: int
    """Without those that fill bins up."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within each bin."""
        sizes = [row.tokens for row in self.rows]
        parts = zip(self.rows, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        outputs = [row.attend(*part) for row, *part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def pack(spans: Sequence[Span], max_tokens: int) -> Iterator[Pack]:
    """Passes of at most `max_tokens` tokens each (a single longer sequence gets one of its own), made as they are
    needed: masks may be large."""
    offsets = np.cumsum([0, *(len(span.asked) for span in spans)]).tolist()
    builder = _Builder(max_tokens)
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].group, spans[i].ids.tolist())):
        if len(spans[i].asked) == 0:
            continue
        if not builder.add(spans[i], offsets[i]):
            yield builder.build()
            builder = _Builder(max_tokens)
            builder.add(spans[i], offsets[i])
    if builder.tokens:
        yield builder.build()


class _Bin:
    """Tries that are computed together; the nodes of a later one follow those of an earlier."""

    def __init__(self) -> None:
        self.tries = [TokenTrie()]
        self.size = 0

    @property
    def is_plain(self) -> bool:
        return len(self.tries) == 1 and self.tries[0].is_plain

    def open(self, mask: Array, triangle: Array) -> None:
        start = 0
        for trie in self.tries:
            end = start + trie.size
            trie.open(mask[start:end, start:end], triangle)
            start = end
        mask[start:, 0] = 0.0  # what fills a bin up must see something, or it would be no number


@dataclass
class _Asked:
    """Positions of a sequence: the nodes of its bin that predict them, the tokens, their places in the batch."""

    bin: _Bin
    nodes: Array
    targets: Array
    offset: int


class _Builder:
    """Collects tries into bins until the token budget is spent."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._bins: list[_Bin] = []
        self._group: int | None = None
        self._asked: list[_Asked] = []

    def add(self, span: Span, offset: int) -> bool:
        """Add the tokens that predict what `span` asks for; False when the budget does not allow it."""
        ids = span.ids[: int(span.asked[-1])]
        kept = self._bins[-1].tries[-1].shared(ids) if span.group == self._group else 0
        joins = span.group == self._group and _saves(self._bins[-1].tries[-1].size, len(ids), kept)
        cost = len(ids) - kept if joins else len(ids)
        if self.tokens and self.tokens + cost > self.max_tokens:
            return False
        if not joins:
            self._open_trie(len(ids))
            self._group = span.group
        home = self._bins[-1]
        before = home.size - home.tries[-1].size
        path = home.tries[-1].add(ids, kept if joins else 0)
        self._asked.append(_Asked(home, path[span.asked - 1] + before, span.ids[span.asked], offset))
        home.size += cost
        self.tokens += cost
        return True

    def build(self) -> Pack:
        rows, starts, ids, depths, at = [], {}, [], [], 0
        for members in self._rows():
            size = members[0].size
            rows.append(BinRow(len(members), size, _mask(members)))
            for each in members:
                starts[id(each)] = at
                filling = np.zeros(size - each.size, dtype=np.int64)
                ids += [part for trie in each.tries for part in trie.ids] + [filling]
                depths += [part for trie in each.tries for part in trie.depths] + [filling]
                at += size
        return Pack(
            ids=_joined(ids),
            positions=_joined(depths),
            rows=rows,
            sources=_joined([asked.nodes + starts[id(asked.bin)] for asked in self._asked]),
            targets=_joined([asked.targets for asked in self._asked]),
            order=_joined([np.arange(asked.offset, asked.offset + len(asked.nodes)) for asked in self._asked]),
            tokens=self.tokens,
        )

    def _open_trie(self, length: int) -> None:
        if self._bins and self._bins[-1].size + length <= BIN_TOKENS:
            self._bins[-1].tries.append(TokenTrie())
        else:
            self._bins.append(_Bin())

    def _rows(self) -> list[list[_Bin]]:
        """Bins that are computed together, the largest first; only equal ones if the budget has no room for filling."""
        filled = _alike(self._bins, FILLED_SHARE)
        if sum(len(members) * members[0].size for members in filled) <= max(self.max_tokens, self._bins[0].size):
            return filled
        return _alike(self._bins, 1.0)


def _saves(size: int, length: int, kept: int) -> bool:
    """Whether sharing `kept` tokens with a trie is cheaper than computing them again: a bin's mask is a square."""
    new = length - kept
    return new * (2 * size + new) - length**2 <= PAIRS_PER_TOKEN * kept


def _alike(bins: list[_Bin], share: float) -> list[list[_Bin]]:
    """Plain bins apart from others; the members of a row fill at least `share` of its largest."""
    rows: list[list[_Bin]] = []
    for each in sorted(bins, key=lambda each: (each.is_plain, -each.size)):
        if rows and rows[-1][0].is_plain == each.is_plain and each.size >= share * rows[-1][0].size:
            rows[-1].append(each)
        else:
            rows.append([each])
    return rows


def _mask(bins: list[_Bin]) -> Tensor | None:
    """None = plainly causal; what fills a bin up stands at its end, where nothing sees it."""
    if bins[0].is_plain:
        return None
    size = bins[0].size
    longest = max(trie.longest for each in bins for trie in each.tries)
    triangle = np.triu(np.full((longest, longest), -np.inf, dtype=np.float32), k=1)
    masks = np.full((len(bins), 1, size, size), -np.inf, dtype=np.float32)
    for each, mask in zip(bins, masks[:, 0], strict=True):
        each.open(mask, triangle)
    return torch.from_numpy(masks)


def _joined(parts: list[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
