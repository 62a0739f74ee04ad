"""The package's decoder as a trainable model: packed sequences, each shared prefix once, the head where the loss is.

Sequences of one group often begin alike (the same prompt, the same conversation so far). Sorted, they form a trie whose
nodes are the tokens to compute; a token attends to its ancestors. A bin holds whole tries, and attention never leaves a
bin. One call computes bins of about one size, the smaller ones padded; nothing else is padded. A sequence that shares
too little to pay for the larger bin begins a trie of its own. Every asked position is a pair: the node that predicts
it, and the token that follows. Where there is a kernel for sequences of various lengths, it takes the place of bins and
masks (segments.py).

Nodes are numbered sequence by sequence, so those below a node are the ones that follow it, up to some end: of that and
of neighbours' common prefixes all else is computed, for a whole pass at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.messages import Array
from areal.engine.model.adapter import LowRank
from areal.engine.model.architecture import Architecture, write_architecture
from areal.engine.model.decoder import Decoder, parameter_count
from areal.engine.model.device import CPU, to_device
from areal.engine.model.low_rank import DecoderAdapter, Switch
from areal.engine.model.published import NamedTensors, WeightWriter
from areal.engine.model.weights import linear_weights, load_weights, named_views, named_weights, save_weights
from areal.engine.training.head import Picks, Temperatures, head_logprobs
from areal.engine.training.segments import SegmentRow, VarlenKernel
from areal.engine.training.token_sets import DrawnFrom

BIN_TOKENS = 32
"""Small tries share a bin up to this size: fewer bins, at the cost of larger masks."""
PAIRS_PER_TOKEN = 1024
"""A token's matrix products cost about as much as attention between this many pairs of tokens."""
FILLED_SHARE = 7 / 8
"""A bin that fills this much of another's size may be computed with it, padded."""


@dataclass
class Span:
    """One sequence and the positions whose tokens are to be predicted."""

    ids: Array
    asked: Array
    """Indices into ids, each >= 1, ascending."""
    group: int
    """Sequences of one group share prefixes."""
    images: tuple[bytes, ...] = ()
    """Encoded images in the order of their placeholders in ids."""


class PackedDecoder:
    """Implements `TrainableModel`, and `Adaptable`."""

    head_layer = "lm_head"

    def __init__(
        self,
        architecture: Architecture,
        *,
        gradient_checkpointing: bool = False,
        device: torch.device = CPU,
        frozen: bool = False,
    ) -> None:
        """The weights are zeros, to be loaded or initialised; frozen ones have no gradient."""
        self._gradient_checkpointing = gradient_checkpointing
        size = parameter_count(architecture)
        self.flat = torch.zeros(size, device=device)
        self.flat_grad = None if frozen else torch.zeros(size, device=device)
        self.decoder = Decoder(architecture, self.flat, self.flat_grad)
        self._adapter: DecoderAdapter | None = None
        self.matrices = sum(p.numel() for p in self.decoder.parameters.values() if p.dim() > 1)

    def passes(self, spans: Sequence[Span], max_tokens: int) -> "Iterator[Pack]":
        return (part.on(self.flat.device) for part in pack(spans, max_tokens))

    def scores(
        self,
        part: "Pack",
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        checkpointing = self._gradient_checkpointing and torch.is_grad_enabled()
        linear = F.linear if self._adapter is None else self._adapter.linear
        hidden = self.decoder.hidden(
            part.ids, part.positions, part.attend, linear, only=part.sources, checkpointing=checkpointing
        )
        if self.decoder.architecture.value_head:
            return self.decoder.values(hidden)[part.picks.rows]
        head = self.decoder.head if self._adapter is None else self._adapter.head()
        return head_logprobs(hidden, head, part.picks, temperatures, drawn, entropies)

    def adapt(self, layers: Mapping[str, LowRank], scale: float) -> Switch:
        self._adapter = DecoderAdapter(self.decoder, layers, scale)
        return self._adapter.switch

    def linear_weights(self) -> NamedTensors:
        return linear_weights(self.decoder)

    def named_weights(self) -> NamedTensors:
        return named_weights(self.decoder)

    def named_views(self, flat: Tensor) -> NamedTensors:
        return named_views(self.decoder.architecture, flat)

    def writer(self, directory: Path, dtype: torch.dtype) -> WeightWriter:
        return WeightWriter(directory, self.named_weights(), dtype=dtype)

    def load(self, directory: Path) -> None:
        load_weights(self.decoder, directory)

    def save(self, directory: Path) -> None:
        save_weights(self.decoder, directory)
        write_architecture(self.decoder.architecture, directory)


def pack(spans: Sequence[Span], max_tokens: int, kernel: VarlenKernel | None = None) -> "Iterator[Pack]":
    """Passes of at most `max_tokens` tokens each (a single longer sequence gets one of its own), made as they are
    needed: masks may be large. `kernel`: computes attention without them."""
    if any(len(span.asked) for span in spans):
        sequences = _Sequences.of(spans)
        for tries in sequences.cut(max_tokens, always_join=kernel is not None):
            yield tries.in_bins(max_tokens) if kernel is None else tries.in_segments(kernel)


@dataclass
class Pack:
    """Tokens of one forward pass; those of `sources` predict `picks`, asked positions `order` of all."""

    ids: Tensor
    positions: Tensor
    rows: "list[_Row]"
    sources: Tensor
    picks: Picks
    order: Tensor
    tokens: int
    """Without padding."""

    def on(self, device: torch.device) -> "Pack":
        """The same on a device."""
        if device.type == "cpu":
            return self
        return Pack(
            ids=to_device(self.ids, device),
            positions=to_device(self.positions, device),
            rows=[row.on(device) for row in self.rows],
            sources=to_device(self.sources, device),
            picks=self.picks.on(device),
            order=to_device(self.order, device),
            tokens=self.tokens,
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, cap: float | None = None
    ) -> Tensor:
        """Attention within each bin of q, k, v [tokens, heads, dimension]; `cap`: scores stay below it, softly."""
        sizes = [row.tokens for row in self.rows]
        parts = zip(self.rows, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        outputs = [row.attend(*part, scale=scale, cap=cap) for row, *part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def within(self, window: int) -> "Pack":
        """The same, where a token attends to the last `window` tokens of its sequence only, itself among them."""
        if int(self.positions.max()) < window:
            return self
        sizes = [row.tokens for row in self.rows]
        rows = [row.within(window, part) for row, part in zip(self.rows, self.positions.split(sizes), strict=True)]
        return replace(self, rows=rows)


@dataclass(frozen=True)
class _BinRow:
    """Neighbouring bins, padded to one size, which one call computes."""

    count: int
    size: int
    mask: Tensor | None
    """[count,1,size,size], 0 where a token attends to another, -inf elsewhere; None = plainly causal."""

    @property
    def tokens(self) -> int:
        return self.count * self.size

    def on(self, device: torch.device) -> "_BinRow":
        return self if self.mask is None else replace(self, mask=to_device(self.mask, device))

    def causal_mask(self, device: torch.device) -> Tensor:
        """What `mask` = None stands for."""
        return torch.full((self.size, self.size), -torch.inf, device=device).triu(1)

    def within(self, window: int, positions: Tensor) -> "_BinRow":
        """A token's ancestors are at smaller positions, so those of them that are too far are known by theirs."""
        places = positions.view(self.count, 1, self.size)
        far = places.transpose(1, 2) - places >= window
        mask = self.causal_mask(positions.device) if self.mask is None else self.mask
        return replace(self, mask=mask.masked_fill(far[:, None], -torch.inf))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, cap: float | None) -> Tensor:
        q, k, v = (x.unflatten(0, (self.count, self.size)).transpose(1, 2) for x in (q, k, v))
        mask = None if self.mask is None else self.mask.to(q.dtype)
        if cap is not None:
            mask = self.causal_mask(q.device) if mask is None else mask
            return _capped_attention(q, k, v, mask, scale, cap).transpose(1, 2).flatten(0, 1)
        causal = mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True, scale=scale)
        return mixed.transpose(1, 2).flatten(0, 1)


_Row = _BinRow | SegmentRow


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, cap: float) -> Tensor:
    """torch's own attention cannot cap its scores."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / cap) * cap + mask
    return scores.float().softmax(dim=-1).to(q.dtype) @ v


@dataclass(frozen=True)
class _Sequences:
    """What is asked of sequences, sorted: the longest prefix that one shares with any before is with its neighbour."""

    ids: Array
    """Of all of them, one after the other, each up to its last asked position."""
    starts: Array
    lengths: Array
    """Tokens that are computed: all before the last asked position."""
    shared: Array
    """How many of these are those of the sequence before; 0 where that is of another group."""
    asked: Array
    """Of all of them."""
    counts: Array
    """Of asked positions."""
    order: Array
    """The numbers of the asked positions among those of the batch."""

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "_Sequences":
        asking = [i for i, span in enumerate(spans) if len(span.asked)]
        keys = _byte_strings([spans[i].ids for i in asking])
        asking = [asking[place] for place in sorted(range(len(keys)), key=lambda n: (spans[asking[n]].group, keys[n]))]
        chosen = [spans[i] for i in asking]
        lengths = np.array([span.asked[-1] for span in chosen])
        ids = np.concatenate([span.ids[: length + 1] for span, length in zip(chosen, lengths.tolist(), strict=True)])
        starts = _starts(lengths + 1)
        groups = np.array([span.group for span in chosen])
        counts = np.array([len(span.asked) for span in chosen])
        offsets = _starts(np.array([len(span.asked) for span in spans]))[asking]
        return cls(
            ids=ids.astype(np.int64, copy=False),
            starts=starts,
            lengths=lengths,
            shared=np.append(0, _common_prefixes(ids, starts, lengths) * (groups[1:] == groups[:-1])),
            asked=np.concatenate([span.asked for span in chosen]),
            counts=counts,
            order=_ranges(offsets, counts),
        )

    def cut(self, max_tokens: int, *, always_join: bool) -> "Iterator[_Tries]":
        """The sequences of each pass. Not every one joins the trie before it, if not told so."""
        kept: list[int] = []
        bins: list[int] = []
        first, tokens, in_trie, in_bin, bin_number = 0, 0, 0, 0, -1
        for number, (length, shared) in enumerate(zip(self.lengths.tolist(), self.shared.tolist(), strict=True)):
            joins = bool(kept) and shared > 0 and (always_join or _saves(in_trie, length, shared))
            new = length - shared if joins else length
            if kept and tokens + new > max_tokens:
                yield _Tries(self, first, np.array(kept), np.array(bins))
                kept, bins, joins, new = [], [], False, length
                first, tokens, bin_number = number, 0, -1
            if not joins:
                in_trie = 0
                if not kept or in_bin + length > BIN_TOKENS:
                    in_bin, bin_number = 0, bin_number + 1
            kept.append(length - new)
            bins.append(bin_number)
            tokens, in_trie, in_bin = tokens + new, in_trie + new, in_bin + new
        yield _Tries(self, first, np.array(kept), np.array(bins))


@dataclass(frozen=True)
class _Tries:
    """The tries of a pass. Node by node they are the tokens that sequences do not share with those before."""

    all: _Sequences
    first: int
    """The sequence that the pass begins with."""
    kept: Array
    """Tokens that each sequence of the pass shares with the one before; 0 = it begins a trie."""
    bins: Array
    """Which bin each is in, from 0."""

    def in_bins(self, max_tokens: int) -> Pack:
        sizes = np.bincount(self.bins, self._new).astype(np.int64)
        begins, ends = _starts(sizes), self._subtree_ends()
        is_plain = np.minimum.reduceat(ends, begins) == begins + sizes
        rows: list[_Row] = []
        places = np.empty(len(ends), np.int64)
        """Of the nodes among the tokens, padding included."""
        at = 0
        for members in _rows_of_bins(sizes, is_plain, max_tokens):
            size = int(sizes[members[0]])
            nodes = _ranges(begins[members], sizes[members])
            within = _ranges(np.arange(len(members)) * size, sizes[members])
            places[nodes] = at + within
            below = np.ones(len(members) * size, np.int64)
            below[within] = ends[nodes] - nodes
            mask = None if is_plain[members[0]] else _mask(below.reshape(-1, size))
            rows.append(_BinRow(len(members), size, mask))
            at += len(members) * size
        return self._pack(rows, places, at)

    def in_segments(self, kernel: VarlenKernel) -> Pack:
        has_new = np.flatnonzero(self._new)
        lengths = self._lengths[has_new]
        keys = self._nodes(np.repeat(has_new, lengths), _ranges(np.zeros_like(lengths), lengths))
        row = SegmentRow.of(kernel, self._new[has_new].tolist(), np.split(keys, lengths.cumsum()[:-1]))
        return self._pack([row], np.arange(row.tokens), row.tokens)

    def _pack(self, rows: "list[_Row]", places: Array, total: int) -> Pack:
        """`places`: of the nodes among `total` tokens, the rest of which is padding."""
        ids, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
        ids[places] = self.all.ids[_ranges(self.all.starts[self._own] + self.kept, self._new)]
        positions[places] = _ranges(self.kept, self._new)
        counts, first = self.all.counts[self._own], int(self.all.counts[: self.first].sum())
        asked = slice(first, first + int(counts.sum()))
        sequence = np.repeat(np.arange(len(counts)), counts)
        sources = places[self._nodes(sequence, self.all.asked[asked] - 1)]
        targets = self.all.ids[self.all.starts[self._own][sequence] + self.all.asked[asked]]
        by_source = np.argsort(sources, kind="stable")
        sources, rows_of_head = np.unique(sources[by_source], return_inverse=True)
        return Pack(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            rows=rows,
            sources=torch.from_numpy(sources),
            picks=Picks.of(rows_of_head, targets[by_source]),
            order=torch.from_numpy(self.all.order[asked][by_source]),
            tokens=len(places),
        )

    @property
    def _own(self) -> slice:
        return slice(self.first, self.first + len(self.kept))

    @property
    def _lengths(self) -> Array:
        return self.all.lengths[self._own]

    @property
    def _new(self) -> Array:
        """Nodes that each sequence adds."""
        return self._lengths - self.kept

    def _nodes(self, sequences: Array, positions: Array) -> Array:
        """The node of a position of a sequence: its own, or of the last before it that begins to differ earlier."""
        before = _nearest_smaller(self.kept)
        sequences = sequences.copy()
        while len(shared := np.flatnonzero(positions < self.kept[sequences])):
            sequences[shared] = before[sequences[shared]]
        return _starts(self._new)[sequences] + positions - self.kept[sequences]

    def _subtree_ends(self) -> Array:
        """Of every node, that after the last one below it: where a later sequence differs at its depth or earlier."""
        kept = np.append(self.kept, 0)
        after = len(kept) - 1 - _nearest_smaller(kept[::-1])[::-1]
        following = np.repeat(np.arange(1, len(kept)), self._new)
        depths = _ranges(self.kept, self._new)
        while len(deeper := np.flatnonzero(kept[following] > depths)):
            following[deeper] = after[following[deeper]]
        return np.append(_starts(self._new), self._new.sum())[following]


def _saves(size: int, length: int, kept: int) -> bool:
    """Whether sharing `kept` tokens with a trie is cheaper than computing them again: a bin's mask is a square."""
    new = length - kept
    return new * (2 * size + new) - length**2 <= PAIRS_PER_TOKEN * kept


def _rows_of_bins(sizes: Array, is_plain: Array, max_tokens: int) -> list[list[int]]:
    """Bins that are computed together, the largest first; only equal ones if the budget has no room for padding."""
    padded = _alike(sizes, is_plain, FILLED_SHARE)
    if sum(len(members) * sizes[members[0]] for members in padded) <= max(max_tokens, sizes[0]):
        return padded
    return _alike(sizes, is_plain, 1.0)


def _alike(sizes: Array, is_plain: Array, share: float) -> list[list[int]]:
    """Plain bins apart from others; the members of a row fill at least `share` of its largest."""
    rows: list[list[int]] = []
    for each in np.lexsort((-sizes, is_plain)).tolist():
        if rows and is_plain[rows[-1][0]] == is_plain[each] and sizes[each] >= share * sizes[rows[-1][0]]:
            rows[-1].append(each)
        else:
            rows.append([each])
    return rows


def _mask(below: Array) -> Tensor:
    """Who attends to whom in a row of bins, by how many tokens are below each [bins,size], itself among them.

    Padding has nothing else below it: what attends to nothing would become NaN.
    """
    numbers = np.arange(below.shape[1])
    ends = (numbers + below)[:, None, None]
    is_ancestor = (numbers <= numbers[:, None]) & (numbers[:, None] < ends)
    return torch.from_numpy(np.where(is_ancestor, np.float32(0), np.float32(-np.inf)))


def _byte_strings(sequences: list[Array]) -> list[bytes]:
    """They compare as the sequences do, whose ids are not negative, and faster."""
    joined = np.concatenate(sequences).astype(">i8").tobytes()
    ends = [8 * end for end in accumulate(map(len, sequences))]
    return [joined[start:end] for start, end in pairwise((0, *ends))]


def _common_prefixes(ids: Array, starts: Array, lengths: Array) -> Array:
    """How many tokens each sequence but the first has in common with the one before it."""
    compared = np.minimum(lengths[1:], lengths[:-1])
    differ = np.flatnonzero(ids[_ranges(starts[1:], compared)] != ids[_ranges(starts[:-1], compared)])
    begins = _starts(compared)
    first = np.append(differ, compared.sum())[np.searchsorted(differ, begins)]
    found: Array = np.minimum(first - begins, compared)
    return found


def _nearest_smaller(values: Array) -> Array:
    """For each the number of the last before it that is smaller; 0 where there is none."""
    found, smaller = [], [(-1, 0)]
    for number, value in enumerate(values.tolist()):
        while smaller[-1][0] >= value:
            smaller.pop()
        found.append(smaller[-1][1])
        smaller.append((value, number))
    return np.array(found)


def _starts(lengths: Array) -> Array:
    """Where each of consecutive parts begins."""
    return lengths.cumsum() - lengths


def _ranges(starts: Array, lengths: Array) -> Array:
    """`lengths[i]` numbers from `starts[i]` on, for all i, one after the other."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
