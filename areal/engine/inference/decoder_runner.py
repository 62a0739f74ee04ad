"""A model's matrices in the layouts that multiply fastest on this processor, made again when the weights change.

Measured on one core at 135M parameters against `F.linear`: a transposed copy is read 1.5 times as fast for a single
token and gains 8 % on long prompts; oneDNN's blocked layout gains 1.2 to 1.7 times between 2 and 16 tokens and is as
good up to 32. Models whose matrices stay in the processor's cache gain nothing, and those whose copies would crowd the
memory do without.
"""

# MERGED-DOC
# The decoder with a key-value cache: prompts, whole or in pieces, and running sequences in; next-token logits out.
#
# The i-th running sequence owns cache row i. What depends on the weights (their
# faster layouts, remembered prefixes) is made again when the buffer of the weights has been written to.
# Shapes: B running sequences, T tokens of a step; the rest as in decoder.py.

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.errors import RequestError
from areal.engine.inference.attention import SharedRows
from areal.engine.inference.kv_cache import CacheShape, KeyValueCache
from areal.engine.inference.layout import StepLayout, lay_out
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.prefix_tree import TOKEN_DIM, PrefixTree
from areal.engine.model.decoder import Decoder

SMALLEST_BYTES = 32 << 20
"""Below this the matrices stay in cache and a plain product costs less to call."""
MEMORY_SHARE = 0.2
"""Copies may take this share of the machine's memory."""
BLOCKED_TOKENS = range(2, 48)
"""Where oneDNN's layout is ahead of the transposed one."""
BLOCKED_FOR = 32
"""Tokens that oneDNN's layout is chosen for; layouts for 8 and 128 were equally fast."""


class Matrices:
    """Multiplies by any of `weights`, which are read again after `refresh`."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        fits = size >= SMALLEST_BYTES and 2 * size <= MEMORY_SHARE * _memory_bytes()
        self.weights = list(weights) if fits and _has_layouts(weights[0].dtype) else []
        self._transposed: dict[int, Tensor] = {}
        self._blocked: dict[int, Tensor] = {}

    def refresh(self) -> None:
        for weight in self.weights:
            key = id(weight)
            if key in self._transposed:
                self._transposed[key].copy_(weight.t())
            else:
                self._transposed[key] = weight.t().contiguous()
            self._blocked[key] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BLOCKED_FOR)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.weights:
            return F.linear(x, weight, bias)
        if x.shape[0] in BLOCKED_TOKENS:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked[id(weight)], bias, "none", [], "")
            return product
        transposed = self._transposed[id(weight)]
        return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)


def _has_layouts(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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

NOTHING = torch.empty(0, dtype=torch.int64)

Prompt = tuple[int, ...]


class DecoderRunner:
    """Implements `ModelRunner` and `MixedRunner`."""

    shortest_prefix = SHORTEST_PREFIX

    def __init__(
        self, decoder: Decoder, *, dtype: torch.dtype = torch.float32, prefix_bytes: int | None = None
    ) -> None:
        """Compute in `dtype`; remembered prefixes take at most `prefix_bytes`.

        None = a tenth of the memory; 0 = nothing is remembered, and nothing is read for several at once.
        """
        self.decoder = decoder
        a = self._architecture = decoder.architecture
        self._computing = decoder if dtype == decoder.flat.dtype else Decoder(a, decoder.flat.to(dtype))
        self._cache = KeyValueCache(CacheShape(a.num_layers, a.num_kv_heads, a.head_dim, dtype), a.max_positions)
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
        passes = [[Piece(homes[prompt], list(prompt), 0, len(prompt)) for prompt in part] for part in _passes(homes)]
        logits = torch.cat([self._step(NOTHING, NOTHING, pieces) for pieces in passes])
        place = {prompt: i for i, prompt in enumerate(homes)}
        return logits[[place[tuple(prompt)] for prompt in prompts]]

    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        return self.forward(torch.tensor(ids), torch.tensor(positions), ())

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        self._cache.keep(ids.shape[0])
        return self._step(ids, positions, pieces)

    def _step(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        self._refresh()
        lengths = (positions + 1).tolist()
        self._cache.advance(lengths)
        for piece in pieces:
            self._make_room(piece)
        for piece in pieces:
            if piece.start:
                self._fetch_beginning(piece)
        shared = self._shared.starts(ids.shape[0]) if self._prefixes.budget_bytes else []
        layout = lay_out(self._cache, ids, positions, lengths, pieces, shared)
        with self._threads(layout.ids.shape[0]):
            logits = self._compute(layout)
        for piece in pieces:
            if piece.last:
                self._settle(piece)
        return logits.float()

    def _compute(self, layout: StepLayout) -> Tensor:
        linear = self._matrices.linear
        hidden = self._computing.hidden(layout.ids, layout.positions, layout.attend, linear)
        return self._computing.logits(hidden if layout.asked is None else hidden[layout.asked], linear)

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        """One thread for a small step, all of them for another."""
        before = torch.get_num_threads()
        small = 2 * tokens * self.decoder.flat.numel() < ONE_THREAD_FLOPS
        reads = tokens == 1 and before <= MEMORY_THREADS
        if before == 1 or not (small or reads):
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Let the sequence in row `source` live in row `target`."""
        self._cache.move(source, target)
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
        if version != self._seen_version:
            self._follow_weights()
            self._seen_version = version

    @torch.inference_mode()
    def _follow_weights(self) -> None:
        if self._computing is not self.decoder:
            self._computing.flat.copy_(self.decoder.flat)
        self._matrices.refresh()
        self._prefixes.clear()

    def _make_room(self, piece: Piece) -> None:
        """Rows for a prompt that will be complete, and for its next token; otherwise the stage."""
        if not piece.last:
            self._cache.reserve_stage(piece.end)
            return
        for row in piece.rows:
            self._cache.put(row, min(len(piece.ids) + 1, self.max_positions))

    def _fetch_beginning(self, piece: Piece) -> None:
        """Put the tokens before a piece where it is computed: into its first row, or on the stage."""
        stage = self._cache.stage
        if not piece.staged:
            blocks = self._prefixes.find(piece.ids[: piece.start])
            place = self._cache.block(piece.rows[0], piece.start) if piece.last else stage.block(0, piece.start)
            place[:] = torch.cat(blocks, dim=TOKEN_DIM)
        elif piece.last:  # leaves the stage to the prompt after it
            self._cache.block(piece.rows[0], piece.start)[:] = stage.block(0, piece.start)

    def _settle(self, piece: Piece) -> None:
        """A complete prompt goes to all of its rows, and may begin a later one."""
        first, *others = piece.rows
        for row in others:
            self._cache.block(row, len(piece.ids))[:] = self._cache.block(first, len(piece.ids))
        for row in piece.rows:
            self._shared.fill(row, piece.ids)
        self.remember(first, piece.ids)


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
