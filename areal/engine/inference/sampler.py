"""Draw the next token of every sequence in a batch at once.

Each request has its own seed, and its n-th token uses the n-th number of that seed's stream, so the tokens of a request
do not depend on the rest of its batch. Shapes: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.model.device import to_device, to_host

CANDIDATES = 512
"""top_p and top_k look at this many of the likeliest before they sort the whole vocabulary."""
BLOCK = 256
"""Tokens whose probabilities are summed before the search for the drawn one goes into detail."""


@dataclass
class SamplingParams:
    """Sampling settings of the sequences in a batch, as columns [B]."""

    temperatures: Tensor
    greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Array
    limited: bool
    """Some row is limited by top_p or top_k."""
    tempered: bool
    """Some row has a temperature other than 1."""
    some_greedy: bool
    _there: Self | None = field(default=None, repr=False, compare=False)
    """The same on the device of the logits, once it was needed."""

    @classmethod
    def of_columns(cls, temperatures: Array, greedy: Array, top_p: Array, top_k: Array, seeds: Array) -> Self:
        """From float32, bool, float32, int64 and uint64 arrays, which it keeps; greedy rows have temperature 1."""
        return cls(
            temperatures=torch.from_numpy(temperatures),
            greedy=torch.from_numpy(greedy),
            top_p=torch.from_numpy(top_p),
            top_k=torch.from_numpy(top_k),
            seeds=seeds,
            limited=bool((((top_p < 1) | (top_k > 0)) & ~greedy).any()),
            tempered=bool((temperatures != 1).any()),
            some_greedy=bool(greedy.any()),
        )

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[float, float, int, int]]) -> Self:
        """From (temperature, top_p, top_k, seed) rows; temperature 0 = greedy."""
        temperatures, top_p, top_k, seeds = zip(*rows, strict=True)
        return cls.of_columns(
            np.array([t or 1.0 for t in temperatures], dtype=np.float32),
            np.array([t == 0 for t in temperatures]),
            np.array(top_p, dtype=np.float32),
            np.array(top_k, dtype=np.int64),
            np.array(seeds, dtype=np.uint64),
        )

    @property
    def limited_rows(self) -> Tensor:
        """Those that have top_p or top_k, and are drawn."""
        return ((self.top_p < 1) | (self.top_k > 0)) & ~self.greedy

    def of(self, rows: Array) -> Self:
        """The settings of some rows."""
        columns = (self.temperatures.numpy(), self.greedy.numpy(), self.top_p.numpy(), self.top_k.numpy(), self.seeds)
        return self.of_columns(*(column[rows] for column in columns))

    def on(self, device: torch.device) -> Self:
        """The same with the columns on a device, but for the seeds; sent there once."""
        if device.type == "cpu":
            return self
        if self._there is None:
            columns = {name: to_device(getattr(self, name), device) for name in _COLUMNS}
            self._there = replace(self, **columns)
        return self._there


_COLUMNS = ("temperatures", "greedy", "top_p", "top_k")


class Sampled(NamedTuple):
    """A token for each row."""

    tokens: list[int]
    logprobs: list[float]
    """Of the distribution that each was drawn from; greedy ones as if they were drawn at temperature 1."""
    sets: dict[int, Array]
    """By row, where top_p or top_k limits it: the tokens that they left, ascending, int32."""


@torch.inference_mode()
def sample(
    logits: Tensor, params: SamplingParams, counts: Sequence[int] | Array, banned: Tensor | None = None
) -> Sampled:
    """Draw a token for each row; `counts[b]` tokens were drawn for row b before, `banned` [B,V] it may not draw.

    What is drawn from is divided by the temperature (by 1 for greedy rows), and is over the tokens that `banned`, and
    then top_p and top_k leave. The trainer computes its log-probs over the same tokens.

    A row in which no token can be drawn (its logits are NaN or infinite, or those of all allowed tokens are -inf) gets
    a log-prob that is NaN or -inf, and some token of the vocabulary. Other rows do not notice.
    """
    params = params.on(logits.device)
    scaled = logits / params.temperatures[:, None] if params.tempered else logits
    allowed = scaled if banned is None else scaled.masked_fill(banned, -torch.inf)
    probs = allowed.softmax(dim=-1)
    likely = _limit(probs, params) if params.limited else probs
    tokens = _invert(likely, to_device(uniforms(params.seeds, counts), logits.device))
    if params.some_greedy:
        tokens = torch.where(params.greedy, allowed.argmax(dim=-1), tokens)
    drawn = probs.gather(1, tokens[:, None]).squeeze(1)
    if params.limited:
        drawn = torch.where(params.limited_rows, drawn / likely.sum(dim=-1), drawn)
    # A token that was drawn is likely enough for its logarithm to be exact.
    tokens, logprobs = to_host(tokens, drawn.log_())
    return Sampled(tokens.tolist(), logprobs.tolist(), _sets(likely, params) if params.limited else {})


def _sets(likely: Tensor, params: SamplingParams) -> dict[int, Array]:
    """The tokens that can be drawn, of each row that is limited."""
    limited = params.limited_rows.nonzero().squeeze(1)
    rows, members, ids = to_host(limited, *(likely[limited] > 0).nonzero().unbind(1))
    ends = torch.searchsorted(members, torch.arange(len(rows) + 1)).tolist()
    found = ids.int().numpy()
    return {row: found[begin:end].copy() for row, (begin, end) in zip(rows.tolist(), pairwise(ends), strict=True)}


_ONE, _WEYL, _MIX_1, _MIX_2 = np.array((1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), dtype=np.uint64)
_S27, _S30, _S31, _S40 = np.array((27, 30, 31, 40), dtype=np.uint64)
_UNIT = np.float32(2**-24)


def uniforms(seeds: Array, counts: Sequence[int] | Array) -> Tensor:
    """The counts[b]-th number in [0, 1) of each seed's stream (splitmix64), on the host."""
    x = seeds + (np.asarray(counts, dtype=np.uint64) + _ONE) * _WEYL  # arrays wrap around without a warning
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    x = x ^ (x >> _S31)
    return torch.from_numpy((x >> _S40).astype(np.float32) * _UNIT)


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u: it adds to the sum, so it is never one of probability 0.

    There is one in every row of numbers, since u has 24 bits and u * total therefore never rounds up to total. In other
    rows it is any.
    """
    last = probs.shape[1] - 1
    if probs.shape[1] % BLOCK or probs.shape[1] < 16 * BLOCK:
        cumulative = probs.cumsum(dim=-1)
        return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True).squeeze(1).clamp_(max=last)
    blocks = probs.view(len(probs), -1, BLOCK)
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1)
    point = u[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, point, right=True).clamp_(max=last // BLOCK)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=-1)
    before = cumulative.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    # Sums of a block that were rounded differently must not lead out of it.
    within = torch.minimum((point - before).clamp_(min=0.0), torch.nextafter(inside[:, -1:], inside.new_zeros(())))
    return (block * BLOCK + torch.searchsorted(inside, within, right=True)).squeeze(1).clamp_(max=last)


def _limit(probs: Tensor, params: SamplingParams) -> Tensor:
    """Zero the probabilities outside the likeliest top_k, and outside the smallest set that holds top_p."""
    size = probs.shape[-1]
    if size <= 2 * CANDIDATES:
        return _limit_ranked(probs, params, *probs.sort(dim=-1, descending=True, stable=True))
    ranked, order = probs.topk(CANDIDATES, dim=-1)
    # Equal ones are in the order of their indices, as in a stable sort of all.
    order, by_index = order.sort(dim=-1)
    ranked, by_rank = ranked.gather(1, by_index).sort(dim=-1, descending=True, stable=True)
    limited = _limit_ranked(probs, params, ranked, order.gather(1, by_rank))
    # Right if the set ends before the candidates do, and not among equals that were left out.
    ended = (limited > 0).sum(dim=-1) < (ranked > ranked[:, -1:]).sum(dim=-1)
    free = ~params.limited_rows
    limited = torch.where(free[:, None], probs, limited)
    rows = (~(ended | free)).nonzero().squeeze(1)
    if len(rows):
        some = replace(params, top_p=params.top_p[rows], top_k=params.top_k[rows], greedy=params.greedy[rows])
        limited[rows] = _limit_ranked(probs[rows], some, *probs[rows].sort(dim=-1, descending=True, stable=True))
    return limited


def _limit_ranked(probs: Tensor, params: SamplingParams, ranked: Tensor, order: Tensor) -> Tensor:
    """The same, given the likeliest in order of rank."""
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    top_k = torch.where(params.top_k > 0, params.top_k, probs.shape[-1])
    # A row without top_p keeps its whole tail: rounding must not make it depend on the rest of its batch.
    top_p = torch.where(params.top_p < 1, params.top_p, torch.inf)
    kept = (before < top_p[:, None]) & (rank < top_k[:, None])
    kept[:, 0] = True  # however small top_p is: in float32 it may be 0
    return torch.zeros_like(probs).scatter_(1, order, torch.where(kept, ranked, 0.0))
