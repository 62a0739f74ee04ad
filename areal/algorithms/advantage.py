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


ROUNDING = 1e-12
"""Relative differences of double-precision sums."""


def group_advantages(
    returns_N: Tensor,  # noqa: N803
    groups_N: Tensor,  # noqa: N803
    baseline: Literal["mean", "leave_one_out", "batch", "none"] = "mean",
    norm: Literal["none", "group", "batch"] = "none",
    completions_N: Tensor | None = None,  # noqa: N803
    episodes_N: Tensor | None = None,  # noqa: N803
) -> Tensor:
    """Advantages [N] of tokens; `completions_N` None = each is a completion of its own, `episodes_N` None = each
    completion is an episode of its own.

    The baseline is the mean of the group or of the batch over completions, of each one's mean return, or the mean over
    the other episodes of the group. `norm` divides by the standard deviation (unbiased: n - 1) within the group, or of
    all advantages; where that is 0, so is the advantage.
    """
    returns = returns_N.double()
    _, group = torch.unique(groups_N, return_inverse=True)
    share, whole = _shares(group, completions_N), torch.zeros_like(group)
    if baseline == "leave_one_out":
        episodes = completions_N if episodes_N is None else episodes_N
        advantages = _against_others(returns, group, share, torch.arange(len(group)) if episodes is None else episodes)
    else:
        compared = {"mean": group, "batch": whole}.get(baseline)
        advantages = returns if compared is None else _centred(returns, compared, share)
    if norm == "group":
        advantages = _divided(advantages, _deviation(returns, group, share))
    elif norm == "batch":
        advantages = _divided(advantages, _deviation(advantages, whole, share))
    return advantages.to(returns_N.dtype, copy=True)


def overlong_penalties(lengths_N: Tensor, limit: int, share: float) -> Tensor:  # noqa: N803
    """What is taken from the returns [N] of completions of these lengths, DAPO's soft punishment: 0 up to the last
    `share` of the limit, then linearly more, 1 at the limit."""
    cache = share * limit
    if cache == 0:
        return torch.zeros(lengths_N.shape, dtype=torch.float64)
    return ((lengths_N.double() - (limit - cache)) / cache).clamp(0, 1)


def kl_costs(
    kl_N: Tensor,  # noqa: N803
    completions_N: Tensor,  # noqa: N803
    positions_N: Tensor,  # noqa: N803
    *,
    per_token: bool,
) -> Tensor:
    """What the KL of tokens takes from their returns [N]: that of the whole completion, or `per_token` their own and
    that of the tokens after them. Positions order the tokens of a completion."""
    _, completion = torch.unique(completions_N, return_inverse=True)
    if not per_token:
        return torch.bincount(completion, kl_N.double())[completion]
    by_position = torch.argsort(positions_N, stable=True)
    order = by_position[torch.argsort(completion[by_position], stable=True)]
    sums = kl_N.double()[order].cumsum(0)
    ends = torch.bincount(completion).cumsum(0) - 1
    to_go = sums[ends][completion[order]] - sums + kl_N.double()[order]
    return torch.empty_like(to_go).index_copy_(0, order, to_go)


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
    return _less(values, torch.where(lowest == highest, lowest, mean)[group])


def _less(values: Tensor, middle: Tensor) -> Tensor:
    """The difference; 0 where it is a rounding error, far below what float32 returns can differ by."""
    difference = values - middle
    return torch.where(difference.abs() <= ROUNDING * values.abs(), 0.0, difference)


def _against_others(values: Tensor, group: Tensor, share: Tensor, episodes: Tensor) -> Tensor:
    """Minus the mean over the group's other episodes, of each one's mean over completions; 0 where there is no other,
    and exactly 0 where all values of the group are equal."""
    numbers, episode = torch.unique(episodes, return_inverse=True)
    keys, own = torch.unique(group * len(numbers) + episode, return_inverse=True)
    means = torch.bincount(own, values * share) / torch.bincount(own, share)
    home = keys // max(1, len(numbers))
    count, total = torch.bincount(home), torch.bincount(home, means)
    others = (total[home] - means) / (count[home] - 1).clamp(min=1)
    lowest, highest = (_over_groups(values, group, reduce) for reduce in ("amin", "amax"))
    nothing = (lowest == highest)[group] | (count[group] == 1)
    return torch.where(nothing, 0.0, _less(values, others[own]))


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
