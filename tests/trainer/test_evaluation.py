"""Held-out rates and how sure they are, against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import make_group

from areal.api.errors import RejectReason
from areal.api.messages import GroupResult, Rejection
from areal.trainer.evaluation import (
    Difference,
    Evaluation,
    Z,
    bootstrap,
    by_task,
    greedy_verdict,
    paired_wilson,
    pass_at_k,
    verdict,
    wilson,
)


def task(*rewards: float, rejected: int = 0) -> GroupResult:
    group = make_group(0, rewards)
    group.rejections.extend(Rejection(RejectReason.TIMEOUT, "slow") for _ in range(rejected))
    return group


def evaluation(*rewards: float, rejected: int = 0) -> Evaluation:
    """An episode per task."""
    return Evaluation.of([*(task(reward) for reward in rewards), *(task(rejected=1) for _ in range(rejected))])


def test_wilson_at_its_closed_forms() -> None:
    square = Z * Z
    assert wilson(0.0, 10) == pytest.approx((0.0, square / (10 + square)))
    assert wilson(1.0, 10) == pytest.approx((10 / (10 + square), 1.0))
    half = Z / (2 * math.sqrt(100 + square))
    assert wilson(0.5, 100) == pytest.approx((0.5 - half, 0.5 + half))
    assert wilson(0.1, 50) == pytest.approx((0.043480, 0.213602), abs=1e-5)


@given(st.integers(0, 60), st.integers(1, 60))
def test_wilson_holds_its_rate_and_solves_its_equation(right: int, count: int) -> None:
    rate = min(right, count) / count
    low, high = wilson(rate, count)
    assert 0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1
    for bound in (low, high):  # the bounds are the rates from which the observed one is Z deviations away
        if 0 < bound < 1 - 1e-12:
            assert (rate - bound) ** 2 == pytest.approx(Z * Z * bound * (1 - bound) / count, abs=1e-9)


def test_paired_interval_of_a_published_example() -> None:
    # Newcombe (1998), table II: 36 pairs both positive, 12 and 2 discordant, 0 negative.
    before, after = [1] * 36 + [0] * 12 + [1] * 2, [1] * 36 + [1] * 12 + [0] * 2
    assert paired_wilson(before, after) == pytest.approx((0.0569, 0.3404), abs=2e-4)


def test_paired_interval_turns_around_with_its_sides() -> None:
    before, after = [0, 0, 0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 0, 0, 1]
    low, high = paired_wilson(before, after)
    assert paired_wilson(after, before) == pytest.approx((-high, -low))
    assert low < np.mean(after) - np.mean(before) < high


def test_few_tasks_that_did_not_change_prove_nothing() -> None:
    low, high = paired_wilson([0, 1, 0, 1], [0, 1, 0, 1])
    assert low < -0.1
    assert high > 0.1


def test_pairing_makes_the_difference_surer_than_two_separate_rates() -> None:
    before = [number % 2 for number in range(200)]
    after = [1 if number % 10 == 0 else each for number, each in enumerate(before)]
    low, high = paired_wilson(before, after)
    apart_low, apart_high = paired_wilson(before, after[::-1])
    assert high - low < 0.6 * (apart_high - apart_low)
    assert low > 0


def test_bootstrap_is_the_normal_interval_for_many_values_and_never_changes() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 4000).tolist()
    half = Z * float(np.std(values)) / math.sqrt(len(values))
    assert bootstrap(values) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.1 * half)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap([2.5, 2.5]) == (2.5, 2.5)


def test_pass_at_k_is_the_share_of_draws_with_a_success() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(3, 0, 3) == 0.0
    assert pass_at_k(3, 3, 1) == 1.0


def test_several_episodes_per_task_give_their_mean_and_pass_at_k() -> None:
    made = Evaluation.of([task(1, 0, 0, 0), task(1, 1, 0, rejected=1), task(0, 0, 0, 0)])
    assert (made.tasks, made.episodes, made.rejected) == (3, 12, 1)
    assert made.reward == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert made.task_rewards == [0.25, 0.5, 0.0]
    assert made.interval == pytest.approx(wilson(0.25, 3)), "a task is one observation"
    assert made.pass_at_k == pytest.approx([0.25, (0.5 + 5 / 6 + 0) / 3, (0.75 + 1 + 0) / 3, (1 + 1 + 0) / 3])
    line = verdict(made, made, 3.0)
    assert "; avg@4, pass@4 0.67 → 0.67; 1 of 12 episodes rejected, counted as failures)" in line


def test_rejected_episodes_are_failures_of_a_success_rate() -> None:
    made = evaluation(1, 1, rejected=2)
    assert (made.tasks, made.rejected, made.reward) == (4, 2, 0.5)
    assert made.interval == pytest.approx(wilson(0.5, 4))
    assert evaluation(rejected=3).reward == 0.0


def test_rejected_episodes_are_left_out_of_a_mean_reward() -> None:
    made = evaluation(0.5, 2.0, rejected=2)
    assert (made.reward, made.is_success, made.rejected) == (1.25, False, 2)
    assert made.task_rewards == [0.5, 2.0, None, None]
    assert made.interval == list(bootstrap([0.5, 2.0]))
    better = Difference.of(made, evaluation(1.5, 3.0, 1.0, 1.0))
    assert better == Difference(1.0, 1.0, 1.0), "only tasks that both know are compared"


def test_tasks_that_are_not_the_same_are_not_paired() -> None:
    assert Difference.of(evaluation(0, 1), evaluation(0, 1, 1)) is None


def test_verdict_is_one_line_with_both_rates_the_time_and_how_sure_it_is() -> None:
    assert verdict(evaluation(0, 1, 0, 0), evaluation(1, 1, 1, 0), 57.6) == (
        "held-out success 0.25 → 0.75 in 58 s (95 %: 0.05–0.70 → 0.30–0.95, difference -0.14 to +0.79)"
    )


def test_rewards_that_are_no_yes_or_no_are_not_called_success() -> None:
    line = verdict(evaluation(0, 1), evaluation(0.5, 1), 1.0)
    assert line.startswith("held-out reward 0.50 → 0.75 in 1 s (95 %: ")


def test_verdict_says_how_many_episodes_are_missing() -> None:
    line = verdict(evaluation(0, 0, 0, 0), evaluation(1, 1, rejected=2), 3.0)
    assert line.startswith("held-out success 0.00 → 0.50 in 3 s (95 %: ")
    assert line.endswith("; 2 of 4 episodes rejected, counted as failures)")


def test_greedy_line_says_how_sure_it_is() -> None:
    line = greedy_verdict(evaluation(0, 1, 0, 0), evaluation(1, 1, 1, 1))
    assert line.startswith("greedy 0.25 → 1.00 on 4 held-out tasks (95 %: 0.05–0.70 → 0.51–1.00, difference ")


def test_samples_of_a_task_become_one_result() -> None:
    one, two = by_task([task(1), task(0), task(0), task(rejected=1)], 2)
    assert ([each.reward for each in one.episodes], one.rejections) == ([1, 0], [])
    assert ([each.reward for each in two.episodes], len(two.rejections)) == ([0], 1)
