"""How much a sample of the behaviour policy says about the proximal one: weights without a gradient.

The log-weight of a token is log proximal - log behaviour, of the weights before the step and of the sampler.
Statistics are taken in double precision over the whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithms.ratio import MAX_LOG_RATIO, Completions
from areal.config.algorithm import Algorithm


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """[N]; 0 = the token is left out."""
    masked: Tensor
    """[N], bool: left out by a bound or a mask."""


def token_weights(log_weight_N: Tensor, advantages_N: Tensor, completions: Completions) -> Tensor:  # noqa: N803
    """Of each token by itself [N]."""
    return _exp(log_weight_N)


def sequence_weights(log_weight_N: Tensor, advantages_N: Tensor, completions: Completions) -> Tensor:  # noqa: N803
    """The product over the tokens of each completion [N]."""
    return _exp(completions.sum(log_weight_N))


def geometric_weights(log_weight_N: Tensor, advantages_N: Tensor, completions: Completions) -> Tensor:  # noqa: N803
    """The geometric mean over the tokens of each completion [N]."""
    return _exp(completions.mean(log_weight_N))


def bounded(weights_N: Tensor, low: float | None, high: float | None, *, truncate: bool) -> Tensor:  # noqa: N803
    """Weights [N] within two bounds: those beyond are held there, or left out."""
    low, high = low or 0.0, torch.inf if high is None else high
    if truncate:
        return weights_N.clamp(low, high)
    return torch.where((weights_N < low) | (weights_N > high), 0.0, weights_N)


def second_moment_kept(
    log_weight_N: Tensor,  # noqa: N803
    advantages_N: Tensor,  # noqa: N803
    most: float,
) -> Tensor:
    """Which tokens are kept [N], bool, so that the second moment is at most `most` (M2PO, 2510.01161, algorithm 1).

    It is the mean of the squared log-weights over those kept tokens that a clip could hold, where the policy has gone
    where the advantage points already. Of these the largest are left out, and no more than it takes. Tokens without an
    advantage, which a clip never holds, do not count, so nor does it matter whether they are here.
    """
    candidates = torch.nonzero(log_weight_N * advantages_N > 0).flatten()
    squares = log_weight_N[candidates].double().square()
    largest_first = torch.argsort(squares, descending=True, stable=True)
    left = torch.arange(len(squares), 0, -1)
    means = squares[largest_first].flip(0).cumsum(0).flip(0) / left
    kept = torch.ones(len(log_weight_N), dtype=torch.bool)
    kept[candidates[largest_first[means > most]]] = False
    return kept


def negative_kept(
    log_weight_N: Tensor,  # noqa: N803
    advantages_N: Tensor,  # noqa: N803
    completions: Completions,
    most: float,
) -> Tensor:
    """Which tokens are kept [N], bool: not those with a negative advantage in completions that the policy has left,
    whose mean log-prob under the behaviour policy is larger by more than `most` (DeepSeek-V3.2, 2512.02556)."""
    return (advantages_N >= 0) | (-completions.mean(log_weight_N) <= most)


def correct(
    weights_N: Tensor,  # noqa: N803
    log_weight_N: Tensor,  # noqa: N803
    advantages_N: Tensor,  # noqa: N803
    completions: Completions,
    algorithm: Algorithm,
) -> Correction:
    """Bound and mask the weights of one of the functions above, or of a user's, as the algorithm says."""
    low, high = algorithm.behave_imp_weight_floor, algorithm.behave_imp_weight_cap
    found = bounded(weights_N, low, high, truncate=algorithm.correction_bound == "truncate")
    if algorithm.second_moment is not None:
        found = found * second_moment_kept(log_weight_N, advantages_N, algorithm.second_moment)
    if algorithm.negative_mask is not None:
        found = found * negative_kept(log_weight_N, advantages_N, completions, algorithm.negative_mask)
    return Correction(found, (found == 0) & (weights_N != 0))


def _exp(log_weight: Tensor) -> Tensor:
    return log_weight.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
