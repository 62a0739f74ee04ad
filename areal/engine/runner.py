"""The decoder with a key-value cache: prompts in, next-token logits out.

Row i of the cache belongs to the i-th running sequence, so a decode step reads one contiguous block. The cache grows by
doubling and never shrinks. Shapes: B sequences, L cached positions; the rest as in decoder.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.errors import RequestError
from areal.engine.decoder import Decoder

PASS_TOKENS = 16384
"""Prompt tokens computed at once: bounds memory when many requests join together."""

Prompt = tuple[int, ...]


class Runner:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        a = decoder.architecture
        self._rows, self._length = 0, 0
        self._keys = [torch.empty(0, a.num_kv_heads, 0, a.head_dim) for _ in range(a.num_layers)]
        self._values = [torch.empty(0, a.num_kv_heads, 0, a.head_dim) for _ in range(a.num_layers)]

    @property
    def flat(self) -> Tensor:
        return self.decoder.flat

    @property
    def max_positions(self) -> int:
        return self.decoder.architecture.max_positions

    @property
    def vocab_size(self) -> int:
        return self.decoder.architecture.vocab_size

    def check(self, ids: Sequence[int], images: Sequence[bytes]) -> None:
        if images:
            raise RequestError("the model sees no pictures, got a request with some; use a vision-language model")

    @torch.inference_mode()
    def prefill(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] = ()
    ) -> Tensor:
        """Fill cache rows with prompts, equal ones computed once; return the logits [B,V] after each."""
        self._reserve(max(rows) + 1, max(map(len, prompts)))
        homes: dict[Prompt, list[int]] = defaultdict(list)
        for row, prompt in zip(rows, prompts, strict=True):
            homes[tuple(prompt)].append(row)
        unique = sorted(homes, key=len)
        logits = torch.cat([self._fill(part, homes) for part in _passes(unique)])
        place = {prompt: i for i, prompt in enumerate(unique)}
        return logits[[place[tuple(prompt)] for prompt in prompts]]

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first B rows; return the logits [B,V] after it."""
        batch, length = len(ids), max(positions) + 1
        self._reserve(batch, length)
        rows, places = torch.arange(batch), torch.tensor(positions)
        mask = torch.zeros(batch, 1, 1, length).masked_fill_(
            (torch.arange(length) > places[:, None])[:, None, None, :], -torch.inf
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, :, places] = k
            values[rows, :, places] = v
            mixed = F.scaled_dot_product_attention(
                q.unsqueeze(2), keys[:batch, :, :length], values[:batch, :, :length], attn_mask=mask, enable_gqa=True
            )
            return mixed.squeeze(2)

        return self.decoder.logits(self.decoder.hidden(torch.tensor(ids), places, attend))

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Let the sequence in row `source` live in row `target`."""
        for cache in (*self._keys, *self._values):
            cache[target, :, :length] = cache[source, :, :length]

    def _fill(self, prompts: Sequence[Prompt], homes: dict[Prompt, list[int]]) -> Tensor:
        """One pass over prompts in order of length: each into its cache rows; the logits after each."""
        runs = [_Run.of(length, list(members), homes) for length, members in groupby(prompts, key=len)]
        sizes = [run.length * run.count for run in runs]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outputs = []
            for run, *parts in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
                q_b, k_b, v_b = (x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for x in parts)
                self._keys[layer][run.rows, :, : run.length] = k_b[run.sources]
                self._values[layer][run.rows, :, : run.length] = v_b[run.sources]
                mixed = F.scaled_dot_product_attention(q_b, k_b, v_b, is_causal=True, enable_gqa=True)
                outputs.append(mixed.transpose(1, 2).flatten(0, 1))
            return torch.cat(outputs)

        ids = torch.tensor([token for prompt in prompts for token in prompt])
        positions = torch.cat([torch.arange(run.length).repeat(run.count) for run in runs])
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        return self.decoder.logits(self.decoder.hidden(ids, positions, attend)[ends])

    def _reserve(self, rows: int, length: int) -> None:
        if rows <= self._rows and length <= self._length:
            return
        rows = self._rows if rows <= self._rows else max(rows, 2 * self._rows, 8)
        length = self._length if length <= self._length else min(max(length, 2 * self._length, 64), self.max_positions)
        for caches in (self._keys, self._values):
            for layer, old in enumerate(caches):
                new = torch.zeros(rows, old.shape[1], length, old.shape[3])
                new[: self._rows, :, : self._length] = old
                caches[layer] = new
        self._rows, self._length = rows, length


@dataclass
class _Run:
    """Neighbouring prompts of one length, and the cache rows that take each."""

    length: int
    count: int
    rows: Tensor
    sources: Tensor
    """The prompt of each row, counted within the run."""

    @classmethod
    def of(cls, length: int, prompts: Sequence[Prompt], homes: dict[Prompt, list[int]]) -> "_Run":
        pairs = [(row, source) for source, prompt in enumerate(prompts) for row in homes[prompt]]
        rows, sources = torch.tensor(pairs).unbind(1)
        return cls(length, len(prompts), rows, sources)


def _passes(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
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
