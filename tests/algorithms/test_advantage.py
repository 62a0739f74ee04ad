"""Advantages in closed form, by group and never by position."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from areal.algorithms.advantage import group_advantages, kl_costs, overlong_penalties

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


def test_leave_one_out_compares_with_the_mean_of_the_groups_other_samples() -> None:
    advantages = group_advantages(RETURNS, GROUPS, "leave_one_out")
    # 1 - (0 + 0 + 1) / 3, 0 - (1 + 0 + 1) / 3, …; the only sample of a group has nothing to be compared with
    torch.testing.assert_close(advantages, torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0]))


def test_leave_one_out_leaves_out_the_whole_episode() -> None:
    """Turns of one episode are not compared with each other: 5 and 1 are of one, 2 and 4 of two others."""
    returns, episodes = torch.tensor([5.0, 1.0, 2.0, 4.0]), torch.tensor([0, 0, 1, 2])
    groups = torch.zeros(4, dtype=torch.int64)
    advantages = group_advantages(returns, groups, "leave_one_out", episodes_N=episodes)
    torch.testing.assert_close(advantages, returns - torch.tensor([3.0, 3.0, (3 + 4) / 2, (3 + 2) / 2]))


def test_leave_one_out_is_the_difference_to_the_mean_times_n_over_n_minus_one() -> None:
    returns, groups = torch.randn(24, generator=torch.Generator().manual_seed(2)), torch.arange(24) % 4
    expected = group_advantages(returns, groups) * 6 / 5
    torch.testing.assert_close(group_advantages(returns, groups, "leave_one_out"), expected)


def test_leave_one_out_of_equal_rewards_is_exactly_zero() -> None:
    advantages = group_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64), "leave_one_out")
    assert torch.equal(advantages, torch.zeros(7))


def test_the_baseline_of_the_batch_is_the_mean_of_all() -> None:
    torch.testing.assert_close(group_advantages(RETURNS, GROUPS, "batch"), RETURNS - 1.0)
    scaled = group_advantages(RETURNS, GROUPS, "batch", "batch")
    torch.testing.assert_close(scaled, (RETURNS - 1.0) / RETURNS.std(correction=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (120, 1.0)])
def test_the_last_share_of_the_length_costs_linearly_more(length: int, penalty: float) -> None:
    assert overlong_penalties(torch.tensor([length]), 100, 0.2).item() == pytest.approx(penalty)


def test_without_a_share_no_length_costs() -> None:
    assert overlong_penalties(torch.tensor([1, 100]), 100, 0.0).tolist() == [0.0, 0.0]


KL = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6])


def test_a_completion_pays_for_all_its_tokens() -> None:
    costs = kl_costs(KL, torch.tensor([3, 9, 3, 9, 3]), torch.arange(5), per_token=False)
    torch.testing.assert_close(costs.float(), torch.tensor([2.1, 1.0, 2.1, 1.0, 2.1]))


def test_a_token_pays_for_itself_and_what_follows_in_its_completion() -> None:
    """Tokens may lie in any order; positions say which is first."""
    completions, positions = torch.tensor([3, 9, 3, 9, 3]), torch.tensor([7, 2, 5, 1, 6])
    costs = kl_costs(KL, completions, positions, per_token=True)
    torch.testing.assert_close(costs.float(), torch.tensor([0.1, 0.2, 0.4 + 1.6 + 0.1, 0.8 + 0.2, 1.6 + 0.1]))


def test_a_return_that_is_the_mean_has_no_advantage_at_all() -> None:
    """Not even a rounding error, which would have a sign."""
    lengths = torch.tensor([7, 3, 9])
    advantages = group_advantages(
        torch.tensor([0.0, 1.0, 2.0]).repeat_interleave(lengths),
        torch.zeros(19, dtype=torch.int64),
        completions_N=torch.arange(3).repeat_interleave(lengths),
    )
    assert torch.equal(advantages[7:10], torch.zeros(3))
