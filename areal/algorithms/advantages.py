"""How much better a completion was than its group: per completion, by group id, never by position."""

from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    returns_C: Tensor,  # noqa: N803
    groups_C: Tensor,  # noqa: N803
    baseline: Literal["mean", "none"] = "mean",
    norm: Literal["none", "group", "batch"] = "none",
    eps: float = 1e-6,
) -> Tensor:
    """Advantages [C]: return minus the mean over the group's completions; `norm` divides by a standard deviation."""
    _, index = torch.unique(groups_C, return_inverse=True)
    advantages = returns_C - _group_mean(returns_C, index) if baseline == "mean" else returns_C.clone()
    if norm == "group":
        centred = returns_C - _group_mean(returns_C, index)
        return advantages / (_group_mean(centred.square(), index).sqrt() + eps)
    if norm == "batch":
        return advantages / (advantages.std(correction=0) + eps)
    return advantages


def loss_weights(completions_N: Tensor, norm: Literal["token", "completion"]) -> Tensor:  # noqa: N803
    """The weight of each token's loss [N]; they sum to 1, equal for all tokens or in sum for all completions."""
    _, index, counts = torch.unique(completions_N, return_inverse=True, return_counts=True)
    if norm == "token":
        return torch.full(completions_N.shape, 1.0 / len(completions_N))
    return 1.0 / (len(counts) * counts[index].float())


def _group_mean(values: Tensor, index: Tensor) -> Tensor:
    return (torch.bincount(index, values) / torch.bincount(index))[index].to(values.dtype)
