"""Lay token sequences behind each other without padding, each shared prefix once.

Sequences of one group often begin alike (the same prompt, the same conversation so far). Sorted, they form a trie whose
nodes are the tokens to compute; a token sees its ancestors. A bin holds whole tries, and attention never leaves a bin.
A sequence that shares too little to pay for the larger bin begins a trie of its own.
Every position that is asked for is a pair: the node that predicts it, and the token that follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.messages import Array

BIN_TOKENS = 256
"""Small tries share a bin up to this size: fewer attention calls, at the cost of a larger mask."""
PAIRS_PER_TOKEN = 1024
"""A token's matrix products cost about as much as attention between this many pairs of tokens."""


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


@dataclass
class Pack:
    """Tokens of one forward pass; `sources[n]` predicts `targets[n]`, the `order[n]`-th position that was asked for."""

    ids: Tensor
    positions: Tensor
    sizes: list[int]
    masks: list[Tensor | None]
    sources: Tensor
    targets: Tensor
    order: Tensor

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within each bin."""
        outputs = []
        for mask, q_b, k_b, v_b in zip(
            self.masks, q.split(self.sizes), k.split(self.sizes), v.split(self.sizes), strict=True
        ):
            mixed = F.scaled_dot_product_attention(
                q_b.transpose(0, 1).unsqueeze(0),
                k_b.transpose(0, 1).unsqueeze(0),
                v_b.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            outputs.append(mixed.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


def pack(spans: Sequence[Span], max_tokens: int) -> list[Pack]:
    """Passes of at most `max_tokens` tokens each (a single longer sequence gets a pass of its own)."""
    offsets = np.cumsum([0, *(len(span.asked) for span in spans)])
    builders = [_Builder(max_tokens)]
    order = sorted(range(len(spans)), key=lambda i: (spans[i].group, spans[i].ids.tolist()))
    for i in order:
        if len(spans[i].asked) == 0:
            continue
        if not builders[-1].add(spans[i], int(offsets[i])):
            builders.append(_Builder(max_tokens))
            builders[-1].add(spans[i], int(offsets[i]))
    return [builder.build() for builder in builders if builder.tokens]


class _Trie:
    """The sequences of one group, added in sorted order, so a shared prefix is always shared with the last one."""

    def __init__(self) -> None:
        self.ids: list[Array] = []
        self.depths: list[Array] = []
        self.blocks: list[tuple[Array, Array, int]] = []
        """Per sequence: its new nodes, its whole path, how much of the path is shared."""
        self.last = np.empty(0, dtype=np.int64)
        self.path = np.empty(0, dtype=np.int64)
        self.size = 0

    def shared(self, ids: Array) -> int:
        length = min(len(ids), len(self.last))
        differs = np.flatnonzero(ids[:length] != self.last[:length])
        return int(differs[0]) if len(differs) else length

    def saves(self, ids: Array) -> bool:
        """Whether sharing the prefix of `ids` is cheaper than computing it again: a bin's mask is a square."""
        kept = self.shared(ids)
        new = len(ids) - kept
        more_pairs = new * (2 * self.size + new) - len(ids) ** 2
        return more_pairs <= PAIRS_PER_TOKEN * kept

    def add(self, ids: Array) -> Array:
        """Add a sequence; return the node of each of its tokens."""
        kept = self.shared(ids)
        new = np.arange(self.size, self.size + len(ids) - kept)
        path = np.concatenate((self.path[:kept], new))
        self.ids.append(ids[kept:])
        self.depths.append(np.arange(kept, len(ids)))
        self.blocks.append((new, path, kept))
        self.last, self.path = ids, path
        self.size += len(new)
        return path


class _Builder:
    """Collects tries into bins until the token budget is spent."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.bins: list[list[_Trie]] = []
        self.group: int | None = None
        self.asked: list[tuple[int, int, Array, Array, Array]] = []
        """Bin, trie within it, source nodes, targets, places in the batch."""

    def add(self, span: Span, offset: int) -> bool:
        """Add the tokens that predict what `span` asks for; False when the budget does not allow it."""
        ids = span.ids[: int(span.asked[-1])].astype(np.int64)
        joins = span.group == self.group and self.bins[-1][-1].saves(ids)
        cost = len(ids) - (self.bins[-1][-1].shared(ids) if joins else 0)
        if self.tokens and self.tokens + cost > self.max_tokens:
            return False
        if not joins:
            self._open_trie(len(ids))
            self.group = span.group
        path = self.bins[-1][-1].add(ids)
        places = np.arange(offset, offset + len(span.asked))
        where = (len(self.bins) - 1, len(self.bins[-1]) - 1)
        self.asked.append((*where, path[span.asked - 1], span.ids[span.asked], places))
        self.tokens += cost
        return True

    def _open_trie(self, length: int) -> None:
        if self.bins and sum(trie.size for trie in self.bins[-1]) + length <= BIN_TOKENS:
            self.bins[-1].append(_Trie())
        else:
            self.bins.append([_Trie()])

    def build(self) -> Pack:
        tries = [trie for each in self.bins for trie in each]
        starts: dict[tuple[int, int], int] = {}
        at = 0
        for b, members in enumerate(self.bins):
            for t, trie in enumerate(members):
                starts[b, t] = at
                at += trie.size
        return Pack(
            ids=torch.from_numpy(np.concatenate([part for trie in tries for part in trie.ids])),
            positions=torch.from_numpy(np.concatenate([part for trie in tries for part in trie.depths])),
            sizes=[sum(trie.size for trie in members) for members in self.bins],
            masks=[_mask(members) for members in self.bins],
            sources=torch.from_numpy(np.concatenate([nodes + starts[b, t] for b, t, nodes, _, _ in self.asked])),
            targets=torch.from_numpy(np.concatenate([targets for *_, targets, _ in self.asked]).astype(np.int64)),
            order=torch.from_numpy(np.concatenate([places for *_, places in self.asked])),
        )


def _mask(tries: list[_Trie]) -> Tensor | None:
    """Additive mask of a bin: 0 where a token's ancestors (and itself) are, -inf elsewhere; None = plainly causal."""
    if len(tries) == 1 and len(tries[0].blocks) == 1:
        return None
    size = sum(trie.size for trie in tries)
    mask = np.full((size, size), -np.inf, dtype=np.float32)
    start = 0
    for trie in tries:
        for new, path, kept in trie.blocks:
            rows = np.arange(len(new))[:, None]
            visible = np.arange(len(path))[None, :] <= rows + kept
            mask[np.ix_(new + start, path + start)] = np.where(visible, 0.0, -np.inf)
        start += trie.size
    return torch.from_numpy(mask)
