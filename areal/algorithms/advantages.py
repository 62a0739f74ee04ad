"""How much better a token did than its group: by group id, never by position. A completion counts once, however long.

Statistics are taken in double precision over completions; the tokens of one share its weight equally. Where every token
of a completion has the same return, as in an export, that is the plain mean and deviation of the completions' returns.
"""

from typing import Literal

import torch
from torch import Tensor

DEVIATION_EPS = 1e-6
"""Added to a standard deviation before dividing by it. Returns are float32, so equal ones that were computed in
different ways may differ by a rounding error; without this, that would be blown up to advantages of about 1."""


def group_advantages(
    returns_N: Tensor,  # noqa: N803
    groups_N: Tensor,  # noqa: N803
    baseline: Literal["mean", "none"] = "mean",
    norm: Literal["none", "group", "batch"] = "none",
    completions_N: Tensor | None = None,  # noqa: N803
) -> Tensor:
    """Advantages [N] of tokens; `completions_N` None = each is a completion of its own.

    The baseline is the mean over a group's completions of each one's mean return. `norm` divides by the standard
    deviation (unbiased: n - 1) within the group, or of all advantages; where that is 0, so is the advantage.
    """
    returns = returns_N.double()
    _, group = torch.unique(groups_N, return_inverse=True)
    share = _shares(group, completions_N)
    advantages = _centred(returns, group, share) if baseline == "mean" else returns
    if norm == "group":
        advantages = _divided(advantages, _deviation(returns, group, share))
    elif norm == "batch":
        advantages = _divided(advantages, _deviation(advantages, torch.zeros_like(group), share))
    return advantages.to(returns_N.dtype, copy=True)


def loss_weights(completions_N: Tensor, norm: Literal["token", "completion"]) -> Tensor:  # noqa: N803
    """The weight of each token's loss [N]; they sum to 1, equal for all tokens or in sum for all completions."""
    _, index, counts = torch.unique(completions_N, return_inverse=True, return_counts=True)
    if norm == "token":
        return torch.full(completions_N.shape, 1.0 / max(1, len(completions_N)))
    return 1.0 / (len(counts) * counts[index].float())


def _shares(group: Tensor, completions: Tensor | None) -> Tensor:
    """What each token counts: the tokens of one completion in one group count 1 together."""
    if completions is None:
        return torch.ones(group.shape, dtype=torch.float64)
    numbers, completion = torch.unique(completions, return_inverse=True)
    _, index, counts = torch.unique(group * len(numbers) + completion, return_inverse=True, return_counts=True)
    return 1.0 / counts[index].double()


def _centred(values: Tensor, group: Tensor, share: Tensor) -> Tensor:
    """Minus the mean of the group; exactly 0 where all its values are equal, which a rounded mean would not give."""
    lowest, highest = (_over_groups(values, group, reduce) for reduce in ("amin", "amax"))
    mean = torch.bincount(group, values * share) / torch.bincount(group, share)
    return values - torch.where(lowest == highest, lowest, mean)[group]


def _deviation(values: Tensor, group: Tensor, share: Tensor) -> Tensor:
    """Standard deviation of the group of each value."""
    squares = torch.bincount(group, _centred(values, group, share).square() * share)
    completions = torch.bincount(group, share).round()
    return (squares / (completions - 1).clamp(min=1)).sqrt()[group]


def _divided(advantages: Tensor, deviation: Tensor) -> Tensor:
    return torch.where(deviation > 0, advantages / (deviation + DEVIATION_EPS), 0.0)


def _over_groups(values: Tensor, group: Tensor, reduce: str) -> Tensor:
    out = values.new_zeros(int(group.max()) + 1 if len(group) else 0)
    return out.scatter_reduce(0, group, values, reduce, include_self=False)
