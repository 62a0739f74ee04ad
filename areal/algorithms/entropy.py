"""The entropy of the policy, estimated from the tokens that were sampled."""

from torch import Tensor


def negative_entropy(logprobs_N: Tensor, log_ratio_N: Tensor) -> Tensor:  # noqa: N803
    """r log p per token [N], with r the ratio to the sampler.

    Its mean is -entropy, and the mean of its gradient that of -entropy, for samples of any policy. One sample says
    little about a distribution, so this is noisy.
    """
    return log_ratio_N.exp() * logprobs_N
