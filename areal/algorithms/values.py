"""What a critic adds: how much better a token did than was expected before it, and what the critic learns from that.

A completion is an episode of its own here. Its return, in which later turns have their share already, comes with its
last token, so how completions are cut into rows does not matter. Statistics are taken in double precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def gae(
    returns_N: Tensor,  # noqa: N803
    values_N: Tensor,  # noqa: N803
    completions_N: Tensor,  # noqa: N803
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> Tensor:
    """Generalised advantage estimates [N] in double precision; the tokens of a completion are in their order.

    With V the value before a token and V' that before the next one, or 0 after the last: A = δ + discount λ A',
    δ = r + discount V' - V. The reward r of a token is what its return exceeds the next one's by, so all of it is the
    last token's where the returns of a completion are equal. λ = 0 gives A = δ, λ = 1 without a discount
    A = return - V.
    """
    order = torch.argsort(completions_N, stable=True)
    _, counts = torch.unique_consecutive(completions_N[order], return_counts=True)
    lasts = counts.cumsum(0) - 1
    returns, values = returns_N[order].double(), values_N[order].double()
    advantages = returns - _following(returns, lasts) + discount * _following(values, lasts) - values
    for back in range(1, int(counts.max()) if len(counts) else 0):
        here = (lasts - back)[counts > back]
        advantages[here] += discount * gae_lambda * advantages[here + 1]
    return torch.empty_like(advantages).index_copy_(0, order, advantages)


@dataclass(frozen=True)
class ValueLoss:
    """Loss per token [N]; the caller weights and sums it."""

    loss: Tensor
    clipped: Tensor
    """1 where the clip of the value bounds the loss."""


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, eps_clip: float | None = None) -> ValueLoss:
    """Half the squared error; with `eps_clip`, that of the value held so near to the old one if that is larger."""
    plain = (values - targets).square() / 2
    if eps_clip is None:
        return ValueLoss(plain, torch.zeros_like(plain))
    held = values.clamp(old_values - eps_clip, old_values + eps_clip)
    bounded = (held - targets).square() / 2
    return ValueLoss(torch.maximum(plain, bounded), (bounded > plain).float())


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 = all is predicted, 0 = no better than a constant is.

    None = the returns are equal, and there is nothing to explain.
    """
    spread = returns.double().var(correction=0)
    if not spread > 0:
        return None
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread)


def _following(values: Tensor, lasts: Tensor) -> Tensor:
    """For each token that of the next one; 0 after the last of a completion."""
    return values.roll(-1).index_fill(0, lasts, 0.0)
