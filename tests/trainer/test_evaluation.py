"""What is said of the held-out tasks, and the share of training time in which the engine worked too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import make_group

from areal.api.errors import RejectReason
from areal.api.messages import GroupResult, Rejection
from areal.trainer.journal import Evaluation, overlap, verdict

Spans = list[tuple[float, float]]


def evaluation(*rewards: float, rejected: int = 0) -> Evaluation:
    results = [make_group(number, [reward]) for number, reward in enumerate(rewards)]
    lost = [GroupResult(-1, [], [Rejection(RejectReason.TIMEOUT, "slow")], {}) for _ in range(rejected)]
    return Evaluation.of([*results, *lost])


def test_verdict_is_one_line_with_both_rates_and_the_time() -> None:
    line = verdict(evaluation(0, 1, 0, 0), evaluation(1, 1, 1, 0), 57.6)
    assert line == "held-out success 0.25 → 0.75 in 58 s"


def test_rewards_that_are_no_yes_or_no_are_not_called_success() -> None:
    assert verdict(evaluation(0, 1), evaluation(0.5, 1), 1.0) == "held-out reward 0.50 → 0.75 in 1 s"


def test_verdict_says_how_many_episodes_are_missing() -> None:
    after = evaluation(1, 1, rejected=2)
    assert (after.tasks, after.rejected, after.reward) == (4, 2, 1.0)
    assert verdict(evaluation(0, 0), after, 3.0) == "held-out success 0.00 → 1.00 in 3 s (2 of 4 episodes rejected)"


def test_nothing_accepted_is_no_success() -> None:
    assert evaluation(rejected=3).reward == 0.0


def disjoint(edges: list[int]) -> Spans:
    ordered = sorted(set(edges))
    return [(float(a), float(b)) for a, b in zip(ordered[::2], ordered[1::2], strict=False)]


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_overlap_is_what_counting_every_instant_says(training_edges: list[int], producing_edges: list[int]) -> None:
    training, producing = disjoint(training_edges), disjoint(producing_edges)

    def inside(spans: Spans, instant: float) -> bool:
        return any(start <= instant < end for start, end in spans)

    instants = [each + 0.5 for each in range(41)]
    trained = [each for each in instants if inside(training, each)]
    both = [each for each in trained if inside(producing, each)]
    assert overlap(training, producing) == pytest.approx(len(both) / len(trained) if trained else 0.0)
