"""The clipped policy objective, and its decoupled form for samples from an older policy."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this: e^20 is beyond every clip, and e^89 beyond float32."""


@dataclass(frozen=True)
class PolicyLoss:
    """Loss per token [N] and what became of the ratio; the caller weights and sums them."""

    loss: Tensor
    clipped: Tensor
    """1 where the clip of the ratio bounds the loss."""
    dual_clipped: Tensor
    """1 where the dual clip bounds it."""
    ratio: Tensor


def clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = pi / pi_old.

    That leaves the loss of a bad token (A < 0) unbounded as r grows; `dual_clip` = c bounds it by c |A|.
    """
    ratio = _ratio(logprobs, old_logprobs)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    loss = -torch.minimum(plain, bounded)
    dual_clipped = torch.zeros_like(loss)
    if dual_clip is not None:
        most = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        dual_clipped = (loss.detach() > most).float()
        loss = torch.minimum(loss, most)
    return PolicyLoss(loss, (bounded < plain).float(), dual_clipped, ratio.detach())


def decoupled_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    weight_cap: float | None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO clipped around the proximal policy, each token weighted by pi_proximal / pi_behaviour.

    Tokens whose weight exceeds `weight_cap` are left out: the behaviour policy says too little about them.
    """
    weight = _ratio(proximal_logprobs, behaviour_logprobs)
    if weight_cap is not None:
        weight = torch.where(weight > weight_cap, torch.zeros_like(weight), weight)
    inner = clipped_loss(logprobs, proximal_logprobs, advantages, eps_low, eps_high, dual_clip)
    return replace(inner, loss=weight * inner.loss)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """A non-negative, low-variance estimate of KL(pi || reference) per sampled token: e^d - d - 1, d = ref - pi."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1
