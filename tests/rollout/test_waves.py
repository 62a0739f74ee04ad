"""Whether groups start at every version or in waves, by how much their durations vary."""

import random

import numpy as np
import pytest

from areal.rollout.waves import Waves, _longest_of


def waves_after(
    durations: list[float], train_seconds: float = 1.0, max_staleness: int = 2, max_running: int = 64
) -> int:
    waves = Waves(16, max_staleness, max_running)
    for seconds in durations:
        waves.ended(seconds, seconds)
    waves.trained(train_seconds)
    return waves.batches()


def group_seconds(sigma: float, count: int = 400) -> list[float]:
    """Of groups of eight, each as long as its longest episode."""
    draw = random.Random(1)
    return [max(draw.lognormvariate(1, sigma) for _ in range(8)) for _ in range(count)]


@pytest.mark.parametrize(("sigma", "batches"), [(0.0, 1), (0.1, 1), (0.25, 1), (0.5, 2), (1.0, 2)])
def test_the_more_durations_vary_the_larger_the_waves(sigma: float, batches: int) -> None:
    assert waves_after(group_seconds(sigma)) == batches


def test_groups_start_at_every_version_where_waves_cannot_help() -> None:
    varied = group_seconds(1.0)
    assert waves_after(varied[:40]) == 1  # too few have been seen
    assert waves_after(varied, max_staleness=1) == 1  # nothing would be in flight when a wave begins
    assert waves_after(varied, max_running=31) == 1  # a wave does not fit
    assert waves_after(varied, train_seconds=1000.0) == 1  # the trainer is what takes long


def test_waves_follow_durations_as_they_change() -> None:
    assert waves_after([*group_seconds(1.0), *[5.0] * 600]) == 1


def test_expected_longest_of_a_few() -> None:
    assert _longest_of(1, np.array([1.0, 2.0, 6.0])) == pytest.approx(3.0)
    assert _longest_of(2, np.array([0.0, 1.0])) == pytest.approx(0.75)
    assert _longest_of(10_000, np.array([1.0, 2.0, 6.0])) == pytest.approx(6.0)
