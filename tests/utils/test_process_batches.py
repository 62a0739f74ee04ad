"""Calls that are sent to a process together: one bad call does not hurt the others."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from misbehaving_calls import Explosive, act

from areal.utils.process_pool.pool import (
    CallCrashed,
    CallError,
    CallFailed,
    CallTimeout,
    LoadFailed,
    PackedFunction,
    ProcessPool,
)

pytestmark = pytest.mark.slow

LONG_SECONDS = 60.0
SHORT_SECONDS = 0.4


ACT = PackedFunction.of(act)
ENDS = {"hang": CallTimeout, "crash": CallCrashed, "raise": CallFailed}


def submit(pool: ProcessPool, *args: Any, timeout_seconds: float = LONG_SECONDS) -> "Future[Any]":
    return pool.submit(ACT, args, timeout_seconds=timeout_seconds)


def primed(pool: ProcessPool) -> ProcessPool:
    """With all of its processes, which have loaded `act`."""
    while len(pool.pids()) < pool.size:
        for future in [submit(pool, "good", value) for value in range(50)]:
            future.result(LONG_SECONDS)
    return pool


def end_of(future: "Future[Any]") -> Any:
    """Its result, or its failure."""
    return future.exception(LONG_SECONDS) or future.result()


@pytest.fixture
def single() -> Iterator[ProcessPool]:
    with ProcessPool(1) as pool:
        yield primed(pool)


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessPool]:
    with ProcessPool(2) as pool:
        yield primed(pool)


def test_calls_after_one_that_hangs_are_run_elsewhere_long_before_its_deadline(shared: ProcessPool) -> None:
    futures = [submit(shared, "hang" if value == 100 else "good", value) for value in range(200)]
    hanging = futures.pop(100)
    assert [future.result(LONG_SECONDS) for future in futures] == [v * 2 for v in range(200) if v != 100]
    assert not hanging.done()
    assert hanging.cancel()


def test_crash_keeps_finished_results_and_runs_every_other_call_exactly_once(
    single: ProcessPool, tmp_path: Path
) -> None:
    note = tmp_path / "ran"
    kinds = ["crash" if value in (7, 8, 30) else "good" for value in range(60)]
    futures = [submit(single, kind, value, str(note)) for value, kind in enumerate(kinds)]
    for value, (kind, future) in enumerate(zip(kinds, futures, strict=True)):
        assert isinstance(end_of(future), CallCrashed) if kind == "crash" else end_of(future) == value * 2
    assert sorted(map(int, note.read_text().split())) == list(range(60))


def test_calls_put_back_again_and_again_run_exactly_once_and_get_their_own_results(
    shared: ProcessPool, tmp_path: Path
) -> None:
    note = tmp_path / "ran"
    futures = [submit(shared, "brief", value, str(note)) for value in range(200)]
    assert [future.result(LONG_SECONDS) for future in futures] == [value * 2 for value in range(200)]
    assert sorted(map(int, note.read_text().split())) == list(range(200))


def test_arguments_that_end_or_hang_the_process_while_they_are_loaded_fail_their_own_call_only() -> None:
    with ProcessPool(1, load_seconds=3.0) as pool:
        primed(pool)
        bad = {5: Explosive("crash"), 20: Explosive("raise"), 21: Explosive("hang")}
        futures = [submit(pool, "good", 1, bad.get(value, "")) for value in range(40)]
        ends = {value: end_of(futures[value]) for value in range(40)}
    assert [type(ends.pop(value)) for value in bad] == [CallCrashed, LoadFailed, CallTimeout]
    assert set(ends.values()) == {2}


def test_cancelling_one_call_of_many_disturbs_no_other(single: ProcessPool) -> None:
    futures = [submit(single, "good" if value % 7 else "hang", value) for value in range(30)]
    for future in futures[::7]:
        assert future.cancel()
    assert all(future.result(LONG_SECONDS) == value * 2 for value, future in enumerate(futures) if value % 7)
    assert len(single.pids()) == 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(["good"] * 12 + ["raise"] * 3 + ["slow", "crash", "hang"]), min_size=1, max_size=40)
)
def test_any_mixture_gives_each_call_its_own_end_and_leaves_the_pool_whole(
    shared: ProcessPool, kinds: list[str]
) -> None:
    futures = [submit(shared, kind, value, timeout_seconds=SHORT_SECONDS) for value, kind in enumerate(kinds)]
    for value, (kind, future) in enumerate(zip(kinds, futures, strict=True)):
        end = end_of(future)
        if kind in ENDS:
            assert isinstance(end, CallError)
            assert type(end) is ENDS[kind]
        else:
            assert end == value * 2
    assert len(shared.pids()) == 2
