"""Recorded numbers reach the collection they were recorded in, and no other."""

import asyncio
from contextlib import suppress

import pytest

from areal.utils import stats_tracker
from areal.utils.stats_tracker import MAX_NAME_CHARACTERS, MAX_NAMES


def test_values_are_collected_under_their_scope() -> None:
    with stats_tracker.collect() as collection:
        stats_tracker.get("rollout").scalar(reward=1.0, turns=2)
        stats_tracker.get("rollout").scalar(reward=0.0)
        stats_tracker.get().scalar(plain=3)
        stats_tracker.scalar(plain=5)
    assert collection.means() == {"rollout/reward": 0.5, "rollout/turns": 2.0, "plain": 4.0}


def test_what_is_recorded_outside_goes_nowhere() -> None:
    stats_tracker.get("rollout").scalar(reward=1.0)
    with stats_tracker.collect() as collection:
        pass
    stats_tracker.scalar(late=1.0)
    assert collection.means() == {}


async def test_concurrent_tasks_have_collections_of_their_own() -> None:
    barrier = asyncio.Barrier(2)

    async def episode(value: float) -> dict[str, float]:
        with stats_tracker.collect() as collection:
            await barrier.wait()
            await asyncio.create_task(helper(value))
            return collection.means()

    async def helper(value: float) -> None:
        stats_tracker.scalar(value=value)

    assert await asyncio.gather(episode(1), episode(2)) == [{"value": 1.0}, {"value": 2.0}]


def test_an_inner_collection_does_not_leak_into_the_outer() -> None:
    with stats_tracker.collect() as outer:
        with suppress(ZeroDivisionError), stats_tracker.collect() as inner:
            stats_tracker.scalar(x=1)
            raise ZeroDivisionError
        stats_tracker.scalar(y=2)
    assert (inner.means(), outer.means()) == ({"x": 1.0}, {"y": 2.0})


def test_names_beyond_the_bound_are_dropped_and_counted_and_known_ones_go_on() -> None:
    with stats_tracker.collect() as collection:
        for number in range(MAX_NAMES + 3):
            stats_tracker.get("rollout").scalar(**{f"task_{number}": 1.0})
        stats_tracker.get("rollout").scalar(task_0=3.0)
        stats_tracker.get("rollout").scalar(task_999=3.0)
    means = collection.means()
    assert len(means) == MAX_NAMES + 1
    assert (means["rollout/task_0"], means["stats_dropped"]) == (2.0, 4.0)
    assert "rollout/task_999" not in means


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME_CHARACTERS + 1), "two\nlines", "bell\a", "lone \ud800"])
def test_a_name_that_no_curve_can_have_is_dropped_and_counted(name: str) -> None:
    with stats_tracker.collect() as collection:
        stats_tracker.scalar(**{name: 1.0})
        stats_tracker.scalar(**{"größe (m²)": 1.0, "x" * MAX_NAME_CHARACTERS: 2.0})
    assert collection.means() == {"größe (m²)": 1.0, "x" * MAX_NAME_CHARACTERS: 2.0, "stats_dropped": 1.0}


def test_what_another_process_dropped_is_added() -> None:
    with stats_tracker.collect() as collection:
        stats_tracker.scalar(stats_dropped=5.0)
        stats_tracker.scalar(**{"": 1.0})
    assert collection.means() == {"stats_dropped": 6.0}
