"""How much each token's loss counts in the sum over a batch."""

from typing import Literal

import torch
from torch import Tensor

from areal.config.algorithm import Algorithm


def loss_weights(
    completions_N: Tensor,  # noqa: N803
    norm: Literal["token", "completion", "episode", "constant"],
    episodes_N: Tensor | None = None,  # noqa: N803
    length: int = 1,
) -> Tensor:
    """The weight of each token's loss [N].

    Equal for all tokens, in sum for all completions, or in sum for all episodes: these sum to 1. Or 1 over `length`
    tokens of each completion, whatever length it has.
    """
    if norm == "token":
        return torch.full(completions_N.shape, 1.0 / max(1, len(completions_N)))
    if norm == "episode":
        assert episodes_N is not None, "the caller knows them"
        completions_N = episodes_N  # noqa: N806
    _, index, counts = torch.unique(completions_N, return_inverse=True, return_counts=True)
    if norm == "constant":
        return torch.full(completions_N.shape, 1.0 / max(1, len(counts) * length))
    return 1.0 / (len(counts) * counts[index].float())


def chosen_weights(completions_N: Tensor, episodes_N: Tensor, algorithm: Algorithm) -> Tensor:  # noqa: N803
    """Those of the built-in variant that `loss_norm` names."""
    return loss_weights(completions_N, algorithm.loss_norm, episodes_N, algorithm.loss_length)  # type: ignore[arg-type]
