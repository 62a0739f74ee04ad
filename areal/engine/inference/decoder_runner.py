"""The package's decoder with a key-value cache: prompts and running sequences in, next-token logits out.

The i-th running sequence owns cache row i. What is computed in a step and where its keys and values go is decided here,
how it is computed by a kernel (kernels.py). Everything that depends on the weights (the kernel's layouts of them,
cached prefixes) is made again once the buffer of the weights has been written to. Shapes: B running sequences, T tokens
of a step; the rest as in model/decoder.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from areal.api.errors import RequestError
from areal.api.messages import Array
from areal.config.rollout import Kernel
from areal.engine.inference.attention import SharedPrefixes
from areal.engine.inference.kernels import choose_kernel
from areal.engine.inference.kv_cache import CacheShape, KeyValueCache
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.prefix_tree import TOKEN_DIM, PrefixTree
from areal.engine.inference.sampler import Sampled, SamplingParams
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
        self,
        decoder: Decoder,
        *,
        dtype: torch.dtype = torch.float32,
        prefix_bytes: int | None = None,
        kernel: Kernel = "auto",
    ) -> None:
        """Compute in `dtype` on the decoder's device; cached prefixes take at most `prefix_bytes`.

        None = a tenth of the memory; 0 = no prefix is cached, and none is read once for several rows. `kernel` as
        `rollout.kernel`; raises KernelUnavailable if it must be the native one and cannot.
        """
        self.decoder = decoder
        self.device = decoder.flat.device
        a = self._architecture = decoder.architecture
        self.kernel = choose_kernel(kernel, decoder, dtype)
        self._cache_shape = CacheShape(a.num_layers, a.num_kv_heads, a.head_dim, self.kernel.cache_dtype, self.device)
        self._cache = self._new_cache()
        self._prefixes = PrefixTree(
            int(PREFIX_MEMORY_SHARE * memory_bytes(self.device)) if prefix_bytes is None else prefix_bytes
        )
        self._shared = SharedPrefixes(SHORTEST_PREFIX)
        self._seen_version = -1
        flops = CHUNK_FLOPS if self.device.type == "cpu" else ACCELERATOR_CHUNK_FLOPS
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

    def move(self, source: int, target: int, length: int) -> None:
        self._cache.move(source, target)
        self._shared.move(source, target)

    def reset(self) -> None:
        self._cache = self._new_cache()
        self._prefixes.clear()
        self._shared = SharedPrefixes(SHORTEST_PREFIX)
        self._seen_version = -1

    def _new_cache(self) -> KeyValueCache:
        return KeyValueCache(self._cache_shape, self.max_positions, dense=self.kernel.reads_neighbours)

    def cached_tokens(self, ids: list[int]) -> int:
        if len(ids) <= SHORTEST_PREFIX or not self._prefixes.budget_bytes:
            return 0
        self._follow_weights()
        count = sum(block.shape[TOKEN_DIM] for block in self._prefixes.find(ids[:-1]))
        return count if count >= SHORTEST_PREFIX else 0

    def remember(self, row: int, ids: list[int]) -> None:
        if len(ids) >= SHORTEST_PREFIX and self._prefixes.budget_bytes:
            with torch.inference_mode():
                self._prefixes.add(ids, self._cache.block(row, len(ids)))

    def _step(self, ids: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Tensor:
        self._follow_weights()
        self._cache.advance(positions.numpy() + 1)
        for piece in pieces:
            self._make_room(piece)
        for piece in pieces:
            if piece.start:
                self._fetch_prefix(piece)
        shared = self._shared.of(ids.shape[0]) if self._prefixes.budget_bytes else []
        logits = self.kernel.logits(self._cache, ids, positions, pieces, shared)
        for piece in pieces:
            if piece.last:
                self._complete_prompt(piece)
        return logits

    def _follow_weights(self) -> None:
        """Make again what depends on the weights, if these have changed."""
        version = self.decoder.flat._version
        if version == self._seen_version:
            return
        with torch.inference_mode():
            self.kernel.refresh()
            self._prefixes.clear()
        self._seen_version = version

    @torch.inference_mode()
    def prepare(self, changes: Sequence[tuple[Tensor, Tensor]]) -> object:
        """What the kernel makes of the new weights, so that nobody waits for it after the swap.

        None = it makes nothing, or there is no room for a second set.
        """
        if not self.kernel.fits_twice:
            return None
        flat = self.decoder.flat
        new_flat = flat.clone()
        for tensor, new in changes:
            offset = tensor.storage_offset() - flat.storage_offset()
            new_flat.as_strided(tensor.shape, tensor.stride(), offset).copy_(new)
        return self.kernel.prepare(Decoder(self._architecture, new_flat))

    @torch.inference_mode()
    def adopt(self, prepared: object) -> None:
        if prepared is None:
            return
        self.kernel.adopt(prepared)
        self._prefixes.clear()
        self._seen_version = self.decoder.flat._version

    def sample(
        self, logits: Tensor, params: SamplingParams, counts: Sequence[int] | Array, banned: Tensor | None = None
    ) -> Sampled:
        return self.kernel.sample(logits, params, counts, banned)

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

    def _complete_prompt(self, piece: Piece) -> None:
        """Copy a complete prompt to all of its rows; a later prompt may begin with it."""
        first, *others = piece.rows
        self._cache.copy(first, others, len(piece.ids))
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
