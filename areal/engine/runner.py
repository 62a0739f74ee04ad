"""The decoder with a key-value cache: prompts in, next-token logits out.

Row i of the cache belongs to the i-th running sequence, so a decode step reads one contiguous block. The cache grows by
doubling and never shrinks. Shapes: B sequences, L cached positions; the rest as in decoder.py.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.decoder import Decoder


class Runner:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        a = decoder.architecture
        self._rows, self._length = 0, 0
        self._keys = [torch.empty(0, a.num_kv_heads, 0, a.head_dim) for _ in range(a.num_layers)]
        self._values = [torch.empty(0, a.num_kv_heads, 0, a.head_dim) for _ in range(a.num_layers)]

    @property
    def max_positions(self) -> int:
        return self.decoder.architecture.max_positions

    @property
    def vocab_size(self) -> int:
        return self.decoder.architecture.vocab_size

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Fill cache rows with prompts, equal ones computed once; return the logits [B,V] after each."""
        self._reserve(max(rows) + 1, max(map(len, prompts)))
        same: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for b, prompt in enumerate(prompts):
            same[tuple(prompt)].append(b)
        unique = sorted(same, key=len)
        ids = torch.tensor([token for prompt in unique for token in prompt])
        positions = torch.cat([torch.arange(len(prompt)) for prompt in unique])
        runs = _equal_lengths(unique)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outputs, at = [], 0
            for length, members in runs:
                span = slice(at, at + length * len(members))
                q_b, k_b, v_b = (x[span].view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
                for b, prompt in enumerate(members):
                    for copy in same[prompt]:
                        self._keys[layer][rows[copy], :, :length] = k_b[b]
                        self._values[layer][rows[copy], :, :length] = v_b[b]
                mixed = F.scaled_dot_product_attention(q_b, k_b, v_b, is_causal=True, enable_gqa=True)
                outputs.append(mixed.transpose(1, 2).flatten(0, 1))
                at = span.stop
            return torch.cat(outputs)

        hidden = self.decoder.hidden(ids, positions, attend)
        ends = torch.cumsum(torch.tensor([len(prompt) for prompt in unique]), 0) - 1
        logits = self.decoder.logits(hidden[ends])
        place = {prompt: i for i, prompt in enumerate(unique)}
        return logits[torch.tensor([place[tuple(prompt)] for prompt in prompts])]

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


def _equal_lengths(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Neighbouring prompts of one length, as (length, members)."""
    runs: list[tuple[int, list[tuple[int, ...]]]] = []
    for prompt in prompts:
        if not runs or runs[-1][0] != len(prompt):
            runs.append((len(prompt), []))
        runs[-1][1].append(prompt)
    return runs
