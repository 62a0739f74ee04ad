"""What a critic adds: how much better a token did than was expected before it, and what the critic learns from that.

The return of a completion, in which later turns have their share already, comes with its last token, so how completions
are cut into rows does not matter. A completion is an episode of its own, unless `Turns` say which one follows which:
then what later turns bring is known by the value before their first token too. Statistics are taken in double
precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """The conversations that completions are turns of."""

    parents_N: Tensor  # noqa: N815
    """Of each token: the completion that its own one continues; -1 = it began a conversation."""
    discount: float = 1.0
    """What a return counts less for the turn before; that of tokens does not apply between two turns."""


def gae(
    returns_N: Tensor,  # noqa: N803
    values_N: Tensor,  # noqa: N803
    completions_N: Tensor,  # noqa: N803
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    turns: Turns | None = None,
) -> Tensor:
    """Generalised advantage estimates [N] in double precision; the tokens of a completion are in their order.

    With V the value before a token and V' that before the next one, or 0 after the last: A = δ + discount λ A',
    δ = r + discount V' - V. The reward r of a token is what its return exceeds the next one's by, so all of it is the
    last token's where the returns of a completion are equal. λ = 0 gives A = δ, λ = 1 without a discount
    A = return - V.

    With `turns`, what follows the last token is the mean over the first tokens of the completions that continue it,
    times the discount of turns: of their returns, values and advantages alike. λ = 1 without a discount of tokens is
    the same with and without them. A continuation that has no tokens here counts by its return alone.
    """
    order = torch.argsort(completions_N, stable=True)
    numbers, counts = torch.unique_consecutive(completions_N[order], return_counts=True)
    lasts = counts.cumsum(0) - 1
    firsts = lasts - counts + 1
    returns, values = returns_N[order].double(), values_N[order].double()
    parents, between = torch.full_like(counts, -1), 0.0
    if turns is not None:
        parents, between = _places(turns.parents_N[order][firsts], numbers), turns.discount

    def after_last(tokens: Tensor) -> Tensor:
        """What continues each completion [C]."""
        return between * _means_of_children(tokens[firsts], parents)

    rewards = returns - _following(returns, lasts, after_last(returns))
    advantages = rewards + _following(discount * values, lasts, after_last(values)) - values
    depths = _depths(parents)
    for depth in range(int(depths.max()) if len(depths) else -1, -1, -1):  # continuations come first
        chosen = depths == depth
        advantages[lasts[chosen]] += gae_lambda * after_last(advantages)[chosen]
        for back in range(1, int(counts[chosen].max())):
            here = (lasts - back)[chosen & (counts > back)]
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


def _following(tokens: Tensor, lasts: Tensor, after_last: Tensor) -> Tensor:
    """For each token that of the next one; what is given after the last of a completion."""
    return tokens.roll(-1).index_copy(0, lasts, after_last)


def _places(wanted: Tensor, numbers: Tensor) -> Tensor:
    """Where each is among sorted numbers; -1 = it is not."""
    places = torch.searchsorted(numbers, wanted).clamp(max=len(numbers) - 1)
    return torch.where(numbers[places] == wanted, places, -1)


def _means_of_children(values_C: Tensor, parents_C: Tensor) -> Tensor:  # noqa: N803
    """Over those that have each as their parent [C]; 0 where none has."""
    has_parent = parents_C >= 0
    parents = parents_C[has_parent]
    sums = torch.zeros_like(values_C).index_add_(0, parents, values_C[has_parent])
    return sums / torch.bincount(parents, minlength=len(parents_C)).clamp(min=1)


def _depths(parents_C: Tensor) -> Tensor:  # noqa: N803
    """How many come before each in its conversation [C]."""
    depths, above = torch.zeros_like(parents_C), parents_C
    while bool((above >= 0).any()):
        depths += above >= 0
        above = torch.where(above >= 0, parents_C[above], -1)
    return depths
