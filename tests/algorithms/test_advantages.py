"""Advantages in closed form, by group and never by position; weights that make a mean."""

import pytest
import torch

from areal.algorithms.advantages import group_advantages, loss_weights

RETURNS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0])
GROUPS = torch.tensor([7, 7, 7, 7, 2])


def test_the_baseline_is_the_mean_of_the_group() -> None:
    torch.testing.assert_close(group_advantages(RETURNS, GROUPS), torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]))


def test_without_a_baseline_the_return_itself_counts() -> None:
    advantages = group_advantages(RETURNS, GROUPS, baseline="none")
    assert torch.equal(advantages, RETURNS)
    assert advantages is not RETURNS


def test_the_position_of_a_completion_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(40, generator=generator)
    groups = torch.randint(0, 6, (40,), generator=generator)
    for norm in ("none", "group", "batch"):
        straight = group_advantages(returns, groups, norm=norm)
        order = torch.randperm(40, generator=generator)
        torch.testing.assert_close(group_advantages(returns[order], groups[order], norm=norm), straight[order])


def test_group_normalisation_divides_by_the_groups_own_deviation() -> None:
    advantages = group_advantages(RETURNS, GROUPS, norm="group")
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0]), atol=1e-5, rtol=0)


def test_batch_normalisation_divides_by_the_deviation_of_all() -> None:
    deviation = torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]).std(correction=0)
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]) / deviation
    torch.testing.assert_close(group_advantages(RETURNS, GROUPS, norm="batch"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_a_group_that_agrees_teaches_nothing(norm: str) -> None:
    advantages = group_advantages(torch.ones(4), torch.zeros(4, dtype=torch.int64), norm=norm)
    assert torch.equal(advantages, torch.zeros(4))


def test_no_completions_give_no_advantages() -> None:
    assert group_advantages(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_double_precision_is_kept() -> None:
    assert group_advantages(RETURNS.double(), GROUPS).dtype == torch.float64


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
