"""The clipped policy objective, and its decoupled form for samples from an older policy."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Loss per token [N] and what became of the ratio; the caller weights and sums them."""

    loss: Tensor
    clipped: Tensor
    """1 where the clip bounds the loss."""
    ratio: Tensor


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> PolicyLoss:
    """PPO: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = pi / pi_old."""
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return PolicyLoss(-torch.minimum(plain, bounded), (bounded < plain).float(), ratio.detach())


def decoupled_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    weight_cap: float | None,
) -> PolicyLoss:
    """PPO clipped around the proximal policy, each token weighted by pi_proximal / pi_behaviour.

    Tokens whose weight exceeds `weight_cap` are left out: the behaviour policy says too little about them.
    """
    weight = torch.exp(proximal_logprobs - behaviour_logprobs)
    if weight_cap is not None:
        weight = torch.where(weight > weight_cap, torch.zeros_like(weight), weight)
    inner = clipped_loss(logprobs, proximal_logprobs, advantages, eps_low, eps_high)
    return PolicyLoss(weight * inner.loss, inner.clipped, inner.ratio)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """A non-negative, low-variance estimate of KL(pi || reference) per sampled token: e^d - d - 1, d = ref - pi."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1
