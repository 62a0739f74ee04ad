import asyncio
from pathlib import Path

import pytest

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

    role = "broken"
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
