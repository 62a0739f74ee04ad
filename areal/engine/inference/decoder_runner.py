"""The package's decoder with a key-value cache: prompts and running sequences in, next-token logits out.

The i-th running sequence owns cache row i. Everything that depends on the weights (faster layouts of the matrices,
cached prefixes) is made again once the buffer of the weights has been written to. Shapes: B running sequences, T tokens
of a step; the rest as in model/decoder.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.errors import RequestError
from areal.engine.inference.attention import SharedPrefixes, StepLayout, lay_out
from areal.engine.inference.kv_cache import CacheShape, KeyValueCache
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.prefix_tree import TOKEN_DIM, PrefixTree
from areal.engine.model.decoder import Decoder
from areal.engine.model.device import memory_bytes, to_device
from areal.engine.model.published import NamedTensors
from areal.engine.model.weights import linear_weights, named_weights

PASS_TOKENS = 16384
"""Prompt tokens computed at once: bounds memory when many requests join together."""
CHUNK_FLOPS = 8e10
"""About half a second on two slow cores: what a prompt may add to a step that others wait for."""
ACCELERATOR_CHUNK_FLOPS = 3e13
"""The same for other devices, by their makers' figures: two thousand tokens of a model with 7e9 parameters."""
SMALLEST_CHUNK = 256
"""Tokens from which matrix products are efficient."""
ONE_THREAD_FLOPS = 1e8
"""Steps smaller than this lose more by waking other threads than these can save."""
MEMORY_THREADS = 2
"""Up to this many threads read memory no faster than one, and a single token costs little but reading the weights."""
SHORTEST_PREFIX = 64
"""Tokens: looking for a shorter prefix costs more than computing it again."""
PREFIX_MEMORY_SHARE = 0.1
"""Of the device's memory, for cached prefixes."""

_NOTHING = torch.empty(0, dtype=torch.int64)
_Prompt = tuple[int, ...]


class DecoderRunner:
    """Implements `ModelRunner` and `MixedRunner`."""

    shortest_prefix = SHORTEST_PREFIX

    def __init__(
        self, decoder: Decoder, *, dtype: torch.dtype = torch.float32, prefix_bytes: int | None = None
    ) -> None:
        """Compute in `dtype` on the decoder's device; cached prefixes take at most `prefix_bytes`.

        None = a tenth of the memory; 0 = no prefix is cached, and none is read once for several rows.
        """
        self.decoder = decoder
        self.device = decoder.flat.device
        self._on_cpu = self.device.type == "cpu"
        a = self._architecture = decoder.architecture
        self._computing = decoder if dtype == decoder.flat.dtype else Decoder(a, decoder.flat.to(dtype))
        self._cache_shape = CacheShape(a.num_layers, a.num_kv_heads, a.head_dim, dtype, self.device)
        self._cache = KeyValueCache(self._cache_shape, a.max_positions)
        self._matrices = Matrices(_matrices(self._computing))
        self._prefixes = PrefixTree(
            int(PREFIX_MEMORY_SHARE * memory_bytes(self.device)) if prefix_bytes is None else prefix_bytes
        )
        self._shared = SharedPrefixes(SHORTEST_PREFIX)
        self._seen_version = -1
        flops = CHUNK_FLOPS if self._on_cpu else ACCELERATOR_CHUNK_FLOPS
        self.chunk_tokens = int(min(max(flops / (2 * decoder.flat.numel()), SMALLEST_CHUNK), PASS_TOKENS))

    def named_weights(self) -> NamedTensors:
        return named_weights(self.decoder)

    def linear_weights(self) -> NamedTensors:
        return linear_weights(self.decoder)

    @property
    def max_positions(self) -> int:
        return self._architecture.max_positions

    @property
    def vocab_size(self) -> int:
        return self._architecture.vocab_size

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        if images:
            raise RequestError(f"the model takes no images, the request has {len(images)}; use a vision-language model")

    @torch.inference_mode()
    def prefill(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] = ()
    ) -> Tensor:
        """Fill cache rows with prompts, equal ones computed once; return the logits [B,V] after each."""
        rows_of: dict[_Prompt, list[int]] = defaultdict(list)
        for row, prompt in zip(rows, prompts, strict=True):
            rows_of[tuple(prompt)].append(row)
        passes = [
            [Piece(rows_of[prompt], list(prompt), 0, len(prompt)) for prompt in part] for part in _passes(rows_of)
        ]
        logits = torch.cat([self._step(_NOTHING, _NOTHING, pieces) for pieces in passes])
        place = {prompt: i for i, prompt in enumerate(rows_of)}
        return logits[to_device(torch.tensor([place[tuple(prompt)] for prompt in prompts]), self.device)]

    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        return self.forward(torch.tensor(ids), torch.tensor(positions), ())

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        self._cache.keep(ids.shape[0])
        return self._step(ids, positions, pieces)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        self._cache.move(source, target)
        self._shared.move(source, target)

    def reset(self) -> None:
        self._cache = KeyValueCache(self._cache_shape, self.max_positions)
        self._prefixes.clear()
        self._shared = SharedPrefixes(SHORTEST_PREFIX)
        self._seen_version = -1

    def cached_tokens(self, ids: list[int]) -> int:
        if len(ids) <= SHORTEST_PREFIX or not self._prefixes.budget_bytes:
            return 0
        self._follow_weights()
        count = sum(block.shape[TOKEN_DIM] for block in self._prefixes.find(ids[:-1]))
        return count if count >= SHORTEST_PREFIX else 0

    @torch.inference_mode()
    def remember(self, row: int, ids: list[int]) -> None:
        if len(ids) >= SHORTEST_PREFIX and self._prefixes.budget_bytes:
            self._prefixes.add(ids, self._cache.block(row, len(ids)))

    def _step(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        self._follow_weights()
        lengths = (positions + 1).tolist()
        self._cache.advance(lengths)
        for piece in pieces:
            self._make_room(piece)
        for piece in pieces:
            if piece.start:
                self._fetch_prefix(piece)
        shared = self._shared.of(ids.shape[0]) if self._prefixes.budget_bytes else []
        layout = lay_out(self._cache, ids, positions, lengths, pieces, shared)
        with self._threads(layout.ids.shape[0]):
            logits = self._compute(layout)
        for piece in pieces:
            if piece.last:
                self._complete_prompt(piece)
        return logits.float()

    def _follow_weights(self) -> None:
        """Make again what depends on the weights, if these have changed."""
        version = self.decoder.flat._version
        if version == self._seen_version:
            return
        with torch.inference_mode():
            if self._computing is not self.decoder:
                self._computing.flat.copy_(self.decoder.flat)
            self._matrices.refresh()
            self._prefixes.clear()
        self._seen_version = version

    @torch.inference_mode()
    def prepare(self, changes: Sequence[tuple[Tensor, Tensor]]) -> "Layouts | None":
        """The layouts of the matrices under new weights, so that nobody waits for them after the swap.

        None = there are none, or no room for a second set.
        """
        if not self._matrices.fit_twice:
            return None
        flat = self.decoder.flat
        new_flat = flat.clone()
        for tensor, new in changes:
            offset = tensor.storage_offset() - flat.storage_offset()
            new_flat.as_strided(tensor.shape, tensor.stride(), offset).copy_(new)
        new_decoder = Decoder(self._architecture, new_flat.to(self._computing.flat.dtype))
        return Layouts.of(_matrices(self._computing), _matrices(new_decoder))

    @torch.inference_mode()
    def adopt(self, prepared: object) -> None:
        if not isinstance(prepared, Layouts):
            return
        if self._computing is not self.decoder:
            self._computing.flat.copy_(self.decoder.flat)
        self._matrices.layouts = prepared
        self._prefixes.clear()
        self._seen_version = self.decoder.flat._version

    def _make_room(self, piece: Piece) -> None:
        """Rows for a prompt that will be complete, and for its next token; otherwise room for the partial prompt."""
        if not piece.last:
            self._cache.reserve_partial(piece.end)
            return
        for row in piece.rows:
            self._cache.put(row, min(len(piece.ids) + 1, self.max_positions))

    def _fetch_prefix(self, piece: Piece) -> None:
        """Copy the tokens before a piece to where it is computed: its first row, or the partial prompt."""
        partial = self._cache.partial
        if not piece.continued:
            blocks = self._prefixes.find(piece.ids[: piece.start])
            place = self._cache.block(piece.rows[0], piece.start) if piece.last else partial.block(0, piece.start)
            place[:] = torch.cat(blocks, dim=TOKEN_DIM)
        elif piece.last:
            self._cache.block(piece.rows[0], piece.start)[:] = partial.block(0, piece.start)

    def _compute(self, layout: StepLayout) -> Tensor:
        linear = self._matrices.linear
        hidden = self._computing.hidden(layout.ids, layout.positions, layout.attend, linear)
        return self._computing.logits(hidden if layout.wanted is None else hidden[layout.wanted], linear)

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        """On a CPU, one thread for a small step, all of them for another."""
        if not self._on_cpu:
            yield
            return
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

    def _complete_prompt(self, piece: Piece) -> None:
        """Copy a complete prompt to all of its rows; a later prompt may begin with it."""
        first, *others = piece.rows
        for row in others:
            self._cache.block(row, len(piece.ids))[:] = self._cache.block(first, len(piece.ids))
        for row in piece.rows:
            self._shared.fill(row, piece.ids)
        self.remember(first, piece.ids)


def _passes(prompts: "dict[_Prompt, list[int]]") -> Iterator[list[_Prompt]]:
    """Neighbours, of at most PASS_TOKENS tokens together."""
    part: list[_Prompt] = []
    tokens = 0
    for prompt in prompts:
        if part and tokens + len(prompt) > PASS_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(prompt)
        tokens += len(prompt)
    yield part


SMALLEST_BYTES = 32 << 20
"""Smaller matrices stay in the processor's cache, where a plain product costs less to call."""
COPIES_MEMORY_SHARE = 0.2
"""Of the machine's memory, for copies of the matrices."""
BLOCKED_TOKENS = range(2, 48)
"""Where oneDNN's layout is ahead of the transposed one."""
BLOCKED_FOR = 32
"""Tokens that oneDNN's layout is chosen for; layouts for 8 and 128 were equally fast."""


@dataclass(frozen=True)
class Layouts:
    """Copies of matrices, by the id of the weight that each is used for."""

    transposed: dict[int, Tensor]
    blocked: dict[int, Tensor]

    @classmethod
    def of(cls, weights: Sequence[Tensor], values: Sequence[Tensor]) -> "Layouts":
        """`values` are those of the weights, now or after a swap."""
        pairs = list(zip(map(id, weights), values, strict=True))
        return cls(
            {key: value.t().contiguous() for key, value in pairs}, {key: _reordered(value) for key, value in pairs}
        )


class Matrices:
    """Multiplies by any of `weights`, in the layouts that are fastest on this processor; `refresh` reads them again.

    On other devices than a CPU that is the plain one.

    Measured on one core at 135M parameters against `F.linear`: a transposed copy is read 1.5 times as fast for a single
    token and gains 8 % on long prompts; oneDNN's blocked layout gains 1.2 to 1.7 times between 2 and 16 tokens and is
    as good up to 32. Models whose matrices stay in the processor's cache gain nothing and get no copies, nor do those
    whose copies would take too much memory.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        room = COPIES_MEMORY_SHARE * memory_bytes(weights[0].device)
        fits = size >= SMALLEST_BYTES and 2 * size <= room
        self.weights = list(weights) if fits and _has_layouts(weights[0]) else []
        self.fit_twice = bool(self.weights) and 5 * size <= room
        """Whether there is room for the weights and layouts of a version that waits for its swap."""
        self.layouts = Layouts({}, {})

    def refresh(self) -> None:
        if not self.layouts.transposed:
            self.layouts = Layouts.of(self.weights, self.weights)
            return
        for weight in self.weights:
            self.layouts.transposed[id(weight)].copy_(weight.t())
            self.layouts.blocked[id(weight)] = _reordered(weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.weights:
            return F.linear(x, weight, bias)
        if x.shape[0] in BLOCKED_TOKENS:
            blocked = self.layouts.blocked[id(weight)]
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")
            return product
        transposed = self.layouts.transposed[id(weight)]
        return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)


def _matrices(decoder: Decoder) -> list[Tensor]:
    return [parameter for parameter in decoder.parameters.values() if parameter.dim() > 1]


def _reordered(weight: Tensor) -> Tensor:
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BLOCKED_FOR)
    return blocked


def _has_layouts(weight: Tensor) -> bool:
    if not (weight.is_cpu and torch.backends.mkldnn.is_available()):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
