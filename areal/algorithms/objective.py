"""What of a token's ratio and advantage is learnt: the objectives, as losses to be minimised.

Each takes log-probs, log-ratios (both with a gradient) and advantages [N]. r is the ratio, A the advantage, p the
probability of the token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.config.algorithm import Algorithm


@dataclass(frozen=True)
class PolicyLoss:
    """Loss per token [N] and what became of the ratio; the caller weights and sums them."""

    loss: Tensor
    clipped_low: Tensor
    """1 where the lower clip of the ratio bounds the loss."""
    clipped_high: Tensor
    """1 where the upper one does."""
    dual_clipped: Tensor
    """1 where the dual clip bounds it."""

    @classmethod
    def unclipped(cls, loss: Tensor) -> "PolicyLoss":
        none = torch.zeros_like(loss).detach()
        return cls(loss, none, none, none)


def clip(logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, algorithm: Algorithm) -> PolicyLoss:  # noqa: N803
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A).

    That leaves the loss of a bad token (A < 0) unbounded as r grows; `dual_clip` = c bounds it by c |A|.
    """
    low, high = algorithm.clips
    ratio = log_ratio_N.exp()
    plain, bounded = ratio * advantages_N, ratio.clamp(1 - low, 1 + high) * advantages_N
    loss = -torch.minimum(plain, bounded)
    held = bounded < plain
    dual_clipped = torch.zeros_like(loss).detach()
    if algorithm.dual_clip is not None:
        most = torch.where(advantages_N < 0, -algorithm.dual_clip * advantages_N, torch.inf)
        dual_clipped = (loss.detach() > most).to(loss.dtype)
        loss = torch.minimum(loss, most)
    return PolicyLoss(
        loss,
        (held & (advantages_N < 0)).to(loss.dtype),
        (held & (advantages_N > 0)).to(loss.dtype),
        dual_clipped,
    )


def importance(logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, algorithm: Algorithm) -> PolicyLoss:  # noqa: N803
    """Importance sampling: -r A."""
    return PolicyLoss.unclipped(-log_ratio_N.exp() * advantages_N)


def cispo(logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, algorithm: Algorithm) -> PolicyLoss:  # noqa: N803
    """-w A log p, where w is the clipped ratio without a gradient: every token keeps one, whatever its ratio."""
    low, high = algorithm.clips
    ratio = log_ratio_N.detach().exp()
    loss = -ratio.clamp(1 - low, 1 + high) * advantages_N * logprobs_N
    below, above = ((ratio < 1 - low).to(loss.dtype), (ratio > 1 + high).to(loss.dtype))
    return PolicyLoss(loss, below, above, torch.zeros_like(below))


def sapo(logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, algorithm: Algorithm) -> PolicyLoss:  # noqa: N803
    """-(4 / t) sigmoid(t (r - 1)) A: the gradient fades as r leaves 1, by the temperature t of the advantage's sign."""
    temperature = torch.where(advantages_N > 0, algorithm.sapo_temperature, algorithm.sapo_temperature_negative)
    gate = torch.sigmoid(temperature * (log_ratio_N.exp() - 1)) * 4 / temperature
    return PolicyLoss.unclipped(-gate * advantages_N)


def reinforce(logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, algorithm: Algorithm) -> PolicyLoss:  # noqa: N803
    """-A log p: no ratio at all."""
    return PolicyLoss.unclipped(-advantages_N * logprobs_N)
