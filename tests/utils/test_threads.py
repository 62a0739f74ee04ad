import os

import pytest

from areal.utils.threads import plan_threads


@pytest.mark.parametrize(("cores", "side_by_side"), [(1, (1, 1)), (2, (1, 1)), (5, (2, 3)), (8, (4, 4))])
def test_cores_are_split_where_both_work_at_once_and_lent_whole_where_they_take_turns(
    monkeypatch: pytest.MonkeyPatch, cores: int, side_by_side: tuple[int, int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    plan = plan_threads(max_head_offpolicyness=2)
    assert (plan.engine, plan.trainer) == side_by_side
    turns = plan_threads(max_head_offpolicyness=0)
    assert (turns.engine, turns.trainer) == (cores, cores)
    assert "take turns" in turns.reason


def test_a_stated_number_of_threads_goes_for_both_sides() -> None:
    plan = plan_threads(max_head_offpolicyness=2, each=3)
    assert (plan.engine, plan.trainer) == (3, 3)
    assert "scheduler.threads=3" in plan.reason
