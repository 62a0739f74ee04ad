"""The package's decoder as a trainable model: packed sequences, each shared prefix once, the head where the loss is.

Sequences of one group often begin alike (the same prompt, the same conversation so far). Sorted, they form a trie whose
nodes are the tokens to compute; a token attends to its ancestors. A bin holds whole tries, and attention never leaves a
bin. One call computes bins of about one size, the smaller ones padded; nothing else is padded. A sequence that shares
too little to pay for the larger bin begins a trie of its own. Every asked position is a pair: the node that predicts
it, and the token that follows. Where there is a kernel for sequences of various lengths, it takes the place of bins and
masks (segments.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.api.messages import Array
from areal.engine.model.architecture import Architecture, write_architecture
from areal.engine.model.decoder import Decoder, parameter_count
from areal.engine.model.device import CPU, to_device
from areal.engine.model.published import NamedTensors
from areal.engine.model.weights import load_weights, named_views, named_weights, save_weights
from areal.engine.training.segments import SegmentRow, VarlenKernel

HEAD_ELEMENTS = 1 << 24
"""Logits held at once: positions times vocabulary."""
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
    """Implements `TrainableModel`."""

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
        self.matrices = sum(p.numel() for p in self.decoder.parameters.values() if p.dim() > 1)

    def passes(self, spans: Sequence[Span], max_tokens: int) -> "Iterator[Pack]":
        return (part.on(self.flat.device) for part in pack(spans, max_tokens))

    def scores(self, part: "Pack", temperatures: Tensor) -> Tensor:
        checkpointing = self._gradient_checkpointing and torch.is_grad_enabled()
        hidden = self.decoder.hidden(part.ids, part.positions, part.attend, checkpointing=checkpointing)[part.sources]
        if self.decoder.architecture.value_head:
            return self.decoder.values(hidden)
        rows = max(1, HEAD_ELEMENTS // self.decoder.architecture.vocab_size)
        pieces = list(zip(hidden.split(rows), part.targets.split(rows), temperatures.split(rows), strict=True))
        if len(pieces) == 1:
            return self._token_logprobs(*pieces[0])
        return torch.cat([self._checkpointed_logprobs(*piece) for piece in pieces])

    def named_weights(self) -> NamedTensors:
        return named_weights(self.decoder)

    def named_views(self, flat: Tensor) -> NamedTensors:
        return named_views(self.decoder.architecture, flat)

    def load(self, directory: Path) -> None:
        load_weights(self.decoder, directory)

    def save(self, directory: Path) -> None:
        save_weights(self.decoder, directory)
        write_architecture(self.decoder.architecture, directory)

    def _checkpointed_logprobs(self, *piece: Tensor) -> Tensor:
        found: Tensor = checkpoint(self._token_logprobs, *piece, use_reentrant=False, preserve_rng_state=False)
        return found

    def _token_logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        return token_logprobs(self.decoder.logits(hidden), targets, temperatures)


def token_logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probability [n] of each target under logits [n,V] at its temperature; float32, whatever the logits are."""
    logits = logits.float() / temperatures[:, None]
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)


def pack(spans: Sequence[Span], max_tokens: int, kernel: VarlenKernel | None = None) -> "Iterator[Pack]":
    """Passes of at most `max_tokens` tokens each (a single longer sequence gets one of its own), made as they are
    needed: masks may be large. `kernel`: computes attention without them."""
    offsets = np.cumsum([0, *(len(span.asked) for span in spans)]).tolist()
    builder = _PackBuilder(max_tokens, kernel)
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].group, spans[i].ids.tolist())):
        if len(spans[i].asked) == 0:
            continue
        if not builder.add(spans[i], offsets[i]):
            yield builder.build()
            builder = _PackBuilder(max_tokens, kernel)
            builder.add(spans[i], offsets[i])
    if builder.tokens:
        yield builder.build()


@dataclass
class Pack:
    """Tokens of one forward pass; `sources[n]` predicts `targets[n]`, asked position number `order[n]` of all."""

    ids: Tensor
    positions: Tensor
    rows: "list[_Row]"
    sources: Tensor
    targets: Tensor
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
            targets=to_device(self.targets, device),
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


class _PackBuilder:
    """Collects tries into bins until the token budget is spent."""

    def __init__(self, max_tokens: int, kernel: VarlenKernel | None) -> None:
        self.max_tokens = max_tokens
        self._kernel = kernel
        self.tokens = 0
        self._bins: list[_Bin] = []
        self._group: int | None = None
        self._asked: list[_Asked] = []

    def add(self, span: Span, offset: int) -> bool:
        """Add the tokens that predict the asked positions of `span`; False when the budget does not allow it."""
        ids = span.ids[: int(span.asked[-1])]
        kept = self._bins[-1].tries[-1].shared(ids) if span.group == self._group else 0
        joins = kept > 0 and (self._kernel is not None or _saves(self._bins[-1].tries[-1].size, len(ids), kept))
        cost = len(ids) - kept if joins else len(ids)
        if self.tokens and self.tokens + cost > self.max_tokens:
            return False
        if not joins:
            self._open_trie(len(ids))
            self._group = span.group
        last = self._bins[-1]
        before = last.size - last.tries[-1].size
        path = last.tries[-1].add(ids, kept if joins else 0)
        self._asked.append(_Asked(last, path[span.asked - 1] + before, span.ids[span.asked], offset))
        last.size += cost
        self.tokens += cost
        return True

    def build(self) -> Pack:
        if self._kernel is not None:
            return self._build_segments(self._kernel)
        rows: list[_Row] = []
        starts, ids, depths, at = {}, [], [], 0
        for members in self._rows():
            size = members[0].size
            rows.append(_BinRow(len(members), size, _mask(members)))
            for each in members:
                starts[id(each)] = at
                padding = np.zeros(size - each.size, dtype=np.int64)
                ids += [part for trie in each.tries for part in trie.ids] + [padding]
                depths += [part for trie in each.tries for part in trie.depths] + [padding]
                at += size
        return self._pack(ids, depths, rows, starts)

    def _build_segments(self, kernel: VarlenKernel) -> Pack:
        tries, starts, segments, at = [], {}, [], 0
        for each in self._bins:
            starts[id(each)] = at
            for trie in each.tries:
                tries.append(trie)
                segments += [(new, keys + at) for new, keys in trie.segments()]
                at += trie.size
        row = SegmentRow.of(kernel, [new for new, _ in segments], [keys for _, keys in segments])
        ids, depths = [part for trie in tries for part in trie.ids], [part for trie in tries for part in trie.depths]
        return self._pack(ids, depths, [row], starts)

    def _pack(self, ids: list[Array], depths: list[Array], rows: "list[_Row]", starts: dict[int, int]) -> Pack:
        """`starts`: of each bin among the tokens."""
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
            self._bins[-1].tries.append(_TokenTrie())
        else:
            self._bins.append(_Bin())

    def _rows(self) -> "list[list[_Bin]]":
        """Bins that are computed together, the largest first; only equal ones if the budget has no room for padding."""
        padded = _alike(self._bins, FILLED_SHARE)
        if sum(len(members) * members[0].size for members in padded) <= max(self.max_tokens, self._bins[0].size):
            return padded
        return _alike(self._bins, 1.0)


def _saves(size: int, length: int, kept: int) -> bool:
    """Whether sharing `kept` tokens with a trie is cheaper than computing them again: a bin's mask is a square."""
    new = length - kept
    return new * (2 * size + new) - length**2 <= PAIRS_PER_TOKEN * kept


def _joined(parts: list[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


class _Bin:
    """Tries that are computed together; the nodes of a later one follow those of an earlier."""

    def __init__(self) -> None:
        self.tries = [_TokenTrie()]
        self.size = 0

    @property
    def is_plain(self) -> bool:
        return len(self.tries) == 1 and self.tries[0].is_plain

    def unmask(self, mask: Array, triangle: Array) -> None:
        """Write 0 into `mask` where a token of the bin attends to another."""
        start = 0
        for trie in self.tries:
            end = start + trie.size
            trie.unmask(mask[start:end, start:end], triangle)
            start = end
        mask[start:, 0] = 0.0  # padding that attends to nothing would become NaN


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
    """None = plainly causal; padding is at the end of a bin, where nothing attends to it."""
    if bins[0].is_plain:
        return None
    size = bins[0].size
    longest = max(trie.longest for each in bins for trie in each.tries)
    triangle = np.triu(np.full((longest, longest), -np.inf, dtype=np.float32), k=1)
    masks = np.full((len(bins), 1, size, size), -np.inf, dtype=np.float32)
    for each, mask in zip(bins, masks[:, 0], strict=True):
        each.unmask(mask, triangle)
    return torch.from_numpy(masks)


@dataclass
class _Asked:
    """Asked positions of a sequence."""

    bin: _Bin
    nodes: Array
    """Of the bin: they predict the positions."""
    targets: Array
    offset: int
    """Number of the first among those of the whole batch."""


_NodeRange = tuple[int, int]
"""Nodes from the first number up to the second."""


class _TokenTrie:
    """Takes sorted sequences: in sorted order the longest shared prefix is always with the previous sequence."""

    def __init__(self) -> None:
        self.ids: list[Array] = []
        self.depths: list[Array] = []
        self.size = 0
        self.is_plain = True
        """Each sequence continues the one before: a token attends to all nodes before it."""
        self._paths: list[list[_NodeRange]] = []
        """Per sequence; the last range is new."""
        self._last = np.empty(0, dtype=np.int64)
        self._last_path = np.empty(0, dtype=np.int64)

    @property
    def longest(self) -> int:
        """The most tokens that a sequence does not share with earlier ones."""
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
        self._last_path = np.concatenate((self._last_path[:kept], np.arange(self.size, end)))
        self.ids.append(ids[kept:])
        self.depths.append(np.arange(kept, len(ids)))
        known = _cut(self._paths[-1], kept) if self._paths else []
        self._paths.append([*known, (self.size, end)])
        self._last, self.size = ids, end
        return self._last_path

    def segments(self) -> list[tuple[int, Array]]:
        """Per sequence with new nodes: how many, and its whole path, of which they are the end."""
        paths = [path for path in self._paths if path[-1][0] < path[-1][1]]
        return [(path[-1][1] - path[-1][0], np.concatenate([np.arange(*nodes) for nodes in path])) for path in paths]

    def unmask(self, mask: Array, triangle: Array) -> None:
        """Write 0 into `mask[size,size]` where a node attends to another; `triangle` has -inf above its diagonal."""
        for *known, (start, end) in self._paths:
            for first, last in known:
                mask[start:end, first:last] = 0.0
            mask[start:end, start:end] = triangle[: end - start, : end - start]


def _cut(path: list[_NodeRange], length: int) -> list[_NodeRange]:
    """The first `length` nodes of a path."""
    kept: list[_NodeRange] = []
    for start, end in path:
        if length <= 0:
            break
        kept.append((start, min(end, start + length)))
        length -= end - start
    return kept
