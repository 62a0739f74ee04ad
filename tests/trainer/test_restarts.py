import asyncio
from pathlib import Path

import pytest

from areal.api.errors import ProcessDied, RanksLost
from areal.api.messages import RANK_ROLE
from areal.config.training import SchedulerConfig
from areal.infra.scheduler import Ask, Placement
from areal.trainer.processes import HOUR_SECONDS, Processes, RestartBudget


def test_budget_allows_so_many_restarts_within_an_hour() -> None:
    now = [0.0]
    budget = RestartBudget(2, clock=lambda: now[0])
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now[0] = HOUR_SECONDS - 1
    assert not budget.spend()
    now[0] = HOUR_SECONDS
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_budget_of_none_allows_none() -> None:
    assert not RestartBudget(0).spend()


class _BrokenPlace:
    """Its process ends at once, and what follows on that fails."""

    name = role = "broken"
    ask: Ask | None = None

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def start(self) -> Placement:
        return await self._processes.spawn("broken", ["timeit", "-n1", "pass"], {})

    async def join(self, placement: Placement) -> None:
        return

    def leave(self) -> None:
        raise RuntimeError("nobody expected this")

    def retire(self) -> bool:
        return False


@pytest.mark.slow
async def test_place_that_cannot_be_kept_any_more_fails_the_run(tmp_path: Path) -> None:
    failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    processes = Processes(SchedulerConfig(), tmp_path / "logs", failed.set_result)
    try:
        await processes.start([_BrokenPlace(processes)])
        assert str(await asyncio.wait_for(failed, 60)) == "nobody expected this"
    finally:
        await processes.close()


class _StartedThirdTime:
    """The keepers of its first two processes die before these run."""

    name = role = "late"
    ask: Ask | None = None

    def __init__(self, processes: Processes) -> None:
        self.starts = 0
        self._processes = processes

    async def start(self) -> Placement:
        self.starts += 1
        if self.starts < 3:
            raise ProcessDied("late cannot be started: its keeper was killed by signal 9")
        return await self._processes.spawn("late", ["timeit", "-n1", "pass"], {})

    async def join(self, placement: Placement) -> None:
        return

    def leave(self) -> None:
        return

    def retire(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("max_restarts", "starts"), [(5, 3), (1, 2)])
async def test_process_whose_keeper_dies_while_the_run_starts_is_started_again_within_the_budget(
    tmp_path: Path, max_restarts: int, starts: int
) -> None:
    processes = Processes(SchedulerConfig(max_restarts=max_restarts), tmp_path / "logs", lambda error: None)
    place = _StartedThirdTime(processes)
    try:
        if starts == 3:
            await asyncio.wait_for(processes.start([place]), 60)
        else:
            with pytest.raises(ProcessDied, match="its keeper was killed"):
                await asyncio.wait_for(processes.start([place]), 60)
    finally:
        await processes.close()
    assert place.starts >= starts if starts == 3 else place.starts == starts


@pytest.mark.slow
async def test_rank_that_is_killed_while_the_run_starts_is_lost_as_at_any_other_time(tmp_path: Path) -> None:
    processes = Processes(SchedulerConfig(), tmp_path / "logs", lambda error: None)
    place = _StartedThirdTime(processes)
    place.role = RANK_ROLE
    try:
        with pytest.raises(RanksLost, match="its keeper was killed"):
            await asyncio.wait_for(processes.start([place], never_again=[RANK_ROLE]), 60)
    finally:
        await processes.close()
