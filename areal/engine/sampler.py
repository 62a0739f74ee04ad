"""Choose tokens for a whole batch at once.

Each request has its own seed, and its n-th token uses the n-th number of that seed's stream, so a request's tokens do
not depend on who shares its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array


@dataclass
class Choices:
    """Sampling settings of the sequences in a batch, as columns [B]."""

    temperatures: Tensor
    greedy: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Array
    limited: bool
    """Some row has top_p or top_k."""

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, int, int]]) -> "Choices":
        """From (temperature, top_p, top_k, seed) rows; temperature 0 = greedy."""
        temperatures, top_p, top_k, seeds = zip(*rows, strict=True)
        return cls(
            temperatures=torch.tensor([t or 1.0 for t in temperatures]),
            greedy=torch.tensor([t == 0 for t in temperatures]),
            top_p=torch.tensor(top_p),
            top_k=torch.tensor(top_k),
            seeds=np.array(seeds, dtype=np.uint64),
            limited=any(p < 1 or k > 0 for _, p, k, _ in rows),
        )


@torch.inference_mode()
def sample(
    logits: Tensor, choices: Choices, counts: Sequence[int], banned: Tensor | None = None
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs; `counts[b]` is how many row b has already drawn, `banned[B,V]` what it may not draw.

    Log-probs are those of the temperature-scaled distribution over the whole vocabulary (temperature 1 for greedy),
    which is what the trainer recomputes; top_p, top_k and `banned` limit the choice without changing them.
    """
    scaled = logits / choices.temperatures[:, None]
    logprobs = scaled.log_softmax(dim=-1)
    probs = logprobs.exp()
    if banned is not None:
        scaled = scaled.masked_fill(banned, -torch.inf)
        probs = scaled.softmax(dim=-1)
    drawn = _invert(_limit(probs, choices) if choices.limited else probs, uniforms(choices.seeds, counts))
    tokens = torch.where(choices.greedy, scaled.argmax(dim=-1), drawn)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()


def uniforms(seeds: Array, counts: Sequence[int]) -> Tensor:
    """The counts[b]-th number in [0, 1) of each seed's stream (splitmix64)."""
    with np.errstate(over="ignore"):
        x = seeds + (np.array(counts, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability passes u: it adds to the sum, so it is never one of probability 0.

    There is one in every row, since u has 24 bits and u * total therefore never rounds up to total.
    """
    cumulative = probs.cumsum(dim=-1)
    point = u[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


def _limit(probs: Tensor, choices: Choices) -> Tensor:
    """Zero what lies outside the likeliest top_k, and outside the smallest set that holds top_p."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(probs.shape[-1])
    top_k = torch.where(choices.top_k > 0, choices.top_k, probs.shape[-1])
    # A row without top_p keeps its whole tail: rounding must not make it depend on who shares its batch.
    top_p = torch.where(choices.top_p < 1, choices.top_p, torch.inf)
    kept = (before < top_p[:, None]) & (rank < top_k[:, None])
    return torch.zeros_like(probs).scatter_(1, order, torch.where(kept, ranked, 0.0))
