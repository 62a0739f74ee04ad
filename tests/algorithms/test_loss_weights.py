"""Weights that make a mean over tokens, completions or episodes, or a sum over a constant length."""

import pytest
import torch

from areal.algorithms.weights import loss_weights

COMPLETIONS = torch.tensor([5, 5, 5, 9, 1, 1])


def test_token_weights_are_equal_and_sum_to_one() -> None:
    torch.testing.assert_close(loss_weights(COMPLETIONS, "token"), torch.full((6,), 1 / 6))


def test_completion_weights_give_each_completion_the_same_and_sum_to_one() -> None:
    weights = loss_weights(COMPLETIONS, "completion")
    torch.testing.assert_close(weights, torch.tensor([1 / 9] * 3 + [1 / 3] + [1 / 6] * 2))
    assert float(weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("norm", ["token", "completion"])
def test_how_completions_lie_in_rows_does_not_change_the_gradient(norm: str) -> None:
    """A row is where tokens happen to be stored: any order and any interleaving of completions is the same batch."""
    generator = torch.Generator().manual_seed(1)
    losses = torch.randn(6, generator=generator)
    order = torch.randperm(6, generator=generator)

    def gradient(order: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(6, requires_grad=True)
        ((losses * scale)[order] * loss_weights(COMPLETIONS[order], norm)).sum().backward()
        assert scale.grad is not None
        return scale.grad

    torch.testing.assert_close(gradient(order), gradient(torch.arange(6)))


def test_episode_weights_give_each_episode_the_same() -> None:
    episodes = torch.tensor([0, 0, 0, 0, 1, 1])
    torch.testing.assert_close(loss_weights(COMPLETIONS, "episode", episodes), torch.tensor([1 / 8] * 4 + [1 / 4] * 2))


def test_constant_weights_divide_by_completions_and_one_length() -> None:
    torch.testing.assert_close(loss_weights(COMPLETIONS, "constant", length=10), torch.full((6,), 1 / 30))
