"""Advantages in closed form, by group and never by position; weights that make a mean."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

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
    deviation = RETURNS[:4].std(correction=1)  # unbiased
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]) / deviation
    torch.testing.assert_close(group_advantages(RETURNS, GROUPS, norm="group"), expected, atol=1e-5, rtol=0)


def test_batch_normalisation_divides_by_the_deviation_of_all() -> None:
    deviation = torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]).std(correction=1)
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0.0]) / deviation
    torch.testing.assert_close(group_advantages(RETURNS, GROUPS, norm="batch"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_a_group_that_agrees_teaches_nothing(norm: str) -> None:
    advantages = group_advantages(torch.ones(4), torch.zeros(4, dtype=torch.int64), norm=norm)
    assert torch.equal(advantages, torch.zeros(4))


NORMS = st.sampled_from(["none", "group", "batch"])
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(rewards=st.lists(FLOAT32, min_size=1, max_size=4), size=st.integers(1, 64), norm=NORMS)
@example(rewards=[9.899999618530273], size=32, norm="group")
def test_groups_of_equal_rewards_give_exactly_zero(rewards: list[float], size: int, norm: str) -> None:
    returns = torch.tensor(rewards, dtype=torch.float32).repeat(size)
    groups = torch.arange(len(rewards)).repeat(size)
    assert torch.equal(group_advantages(returns, groups, norm=norm), torch.zeros(len(returns)))


@given(reward=FLOAT32, size=st.integers(1, 64), norm=st.sampled_from(["group", "batch"]))
def test_without_a_spread_nothing_is_divided_by_almost_zero(reward: float, size: int, norm: str) -> None:
    returns = torch.full((size,), reward, dtype=torch.float32)
    advantages = group_advantages(returns, torch.zeros(size, dtype=torch.int64), "none", norm)
    assert torch.equal(advantages, torch.zeros(size))


@given(
    rewards=st.lists(st.integers(-640, 640), min_size=2, max_size=40),
    shift=st.integers(-(2**16), 2**16),
    norm=NORMS,
    data=st.data(),
)
def test_a_constant_added_to_all_rewards_changes_nothing(
    rewards: list[int], shift: int, norm: str, data: st.DataObject
) -> None:
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards))))
    returns = torch.tensor(rewards) / 64  # sixty-fourths: adding the shift rounds nothing
    straight = group_advantages(returns, groups, norm=norm)
    torch.testing.assert_close(group_advantages(returns + shift, groups, norm=norm), straight, atol=1e-6, rtol=1e-6)


def test_rewards_that_differ_by_a_rounding_error_are_not_blown_up() -> None:
    returns = torch.tensor([0.3, 0.1 + 0.2, 0.30000001192092896 + 2**-25] * 4)
    advantages = group_advantages(returns, torch.zeros(12, dtype=torch.int64), norm="group")
    assert float(advantages.abs().max()) < 0.1


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_tokens_of_one_return_have_the_advantage_of_their_completion(norm: str) -> None:
    """However long completions are, each counts once."""
    lengths = torch.tensor([1, 7, 2, 30, 4])
    expected = group_advantages(RETURNS, GROUPS, norm=norm).repeat_interleave(lengths)
    tokens = group_advantages(
        RETURNS.repeat_interleave(lengths),
        GROUPS.repeat_interleave(lengths),
        norm=norm,
        completions_N=torch.arange(5).repeat_interleave(lengths),
    )
    torch.testing.assert_close(tokens, expected)


def test_returns_per_token_are_compared_with_the_mean_of_the_completions_means() -> None:
    returns, completions = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([0, 0, 0, 1])
    groups = torch.zeros(4, dtype=torch.int64)
    advantages = group_advantages(returns, groups, completions_N=completions)
    torch.testing.assert_close(advantages, returns - (2.0 + 0.0) / 2)
    # (2² + 0² + 1²) / 3 for the first completion, 1² for the second, over 2 - 1
    normed = group_advantages(returns, groups, norm="group", completions_N=completions)
    torch.testing.assert_close(normed, (returns - 1) / (5 / 3 + 1) ** 0.5, atol=1e-5, rtol=0)


def test_a_completion_in_two_groups_counts_once_in_each() -> None:
    returns, groups = torch.tensor([3.0, 1.0, 5.0, 4.0]), torch.tensor([0, 0, 1, 1])
    advantages = group_advantages(returns, groups, completions_N=torch.tensor([0, 1, 1, 1]))
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, 0.5, -0.5]))


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
