"""Estimates of KL(policy || reference) per sampled token, and what their gradients are as a loss.

d = log policy - log reference of the token, r = its ratio to the sampler. On samples of the policy itself:

| | value | mean | mean gradient as a loss |
|---|---|---|---|
| k1 | d | the KL | 0: it pulls nowhere, and belongs in the reward |
| k2 | d² / 2 | near the KL | that of KL(policy ‖ reference), the reverse KL |
| k3 | e^-d + d - 1 | the KL | that of KL(reference ‖ policy), the forward KL |
| k3_corrected | r (e^-d + d - 1) | the KL, of any sampler's samples | that of KL(policy ‖ reference) |
"""

from torch import Tensor


def k1(log_difference_N: Tensor, log_ratio_N: Tensor) -> Tensor:  # noqa: N803
    return log_difference_N


def k2(log_difference_N: Tensor, log_ratio_N: Tensor) -> Tensor:  # noqa: N803
    return log_difference_N.square() / 2


def k3(log_difference_N: Tensor, log_ratio_N: Tensor) -> Tensor:  # noqa: N803
    """Never negative, and of low variance."""
    return (-log_difference_N).exp() + log_difference_N - 1


def k3_corrected(log_difference_N: Tensor, log_ratio_N: Tensor) -> Tensor:  # noqa: N803
    """k3 with the ratio in its gradient too (DeepSeek-V3.2, 2512.02556)."""
    return log_ratio_N.exp() * k3(log_difference_N, log_ratio_N)
