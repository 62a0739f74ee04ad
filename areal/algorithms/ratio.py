"""Of what the policy's ratio is taken: of each token, or of a completion as a whole.

A pass may hold some tokens of a completion only. The ratio of a whole one is exact nevertheless: its value needs the
log-ratios of all tokens, which are known, and its gradient is a sum over tokens, each of which is in some pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this: e^20 is beyond every clip, and e^89 beyond float32."""


@dataclass(frozen=True)
class Completions:
    """Which completions N tokens belong to, all of a batch or those of a pass."""

    index_N: Tensor  # noqa: N815
    """From 0 on."""
    tokens_N: Tensor  # noqa: N815
    """How many tokens the completion of each has, here and in other passes."""
    whole_N: Tensor | None = None  # noqa: N815
    """The sum of the log-ratios of all these, if some are in other passes."""

    @classmethod
    def of(cls, completions_N: Tensor) -> "Completions":  # noqa: N803
        """All tokens are here."""
        _, index, counts = torch.unique(completions_N, return_inverse=True, return_counts=True)
        return cls(index, counts[index])

    def sum(self, values_N: Tensor) -> Tensor:  # noqa: N803
        """Over the completion of each token [N], in double precision where the device has it: of log-ratios, if some of
        its tokens are in other passes."""
        if self.whole_N is not None:
            return self.whole_N
        exact = values_N if values_N.device.type == "mps" else values_N.double()
        count = int(self.index_N.max()) + 1 if len(self.index_N) else 0
        return exact.new_zeros(count).index_add_(0, self.index_N, exact)[self.index_N]

    def mean(self, values_N: Tensor) -> Tensor:  # noqa: N803
        """The same divided by how many tokens the completion has."""
        return self.sum(values_N) / self.tokens_N


def log_ratios(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:  # noqa: N803
    """Of single tokens [N]."""
    return (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_ratio(log_ratio_N: Tensor, completions: Completions | None) -> Tensor:  # noqa: N803
    """Log-ratios [N] as they are."""
    return log_ratio_N


def sequence_ratio(log_ratio_N: Tensor, completions: Completions) -> Tensor:  # noqa: N803
    """The mean over each completion [N], so the ratio is a geometric mean (GSPO).

    Each token carries the gradient of its own log-prob alone. In a loss that gives the T tokens of a completion the
    same weight, T times that is the gradient of the mean times T.
    """
    own = log_ratio_N.detach()
    return completions.mean(own).to(own.dtype) + (log_ratio_N - own)
