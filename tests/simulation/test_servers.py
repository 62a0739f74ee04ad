"""Shared servers against closed forms."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.simulation.scenario import run_virtually
from areal.simulation.servers import Machine, Router, SharedServer


def now() -> float:
    return asyncio.get_running_loop().time()


async def served(server: SharedServer, work: float, after: float = 0.0) -> float:
    await asyncio.sleep(after)
    await server.serve(work)
    return now()


def test_a_lone_job_takes_its_fixed_and_its_shared_time() -> None:
    async def play() -> float:
        return await served(SharedServer(0.02, 0.01), 100)

    assert run_virtually(play()) == pytest.approx(3.0)


def test_jobs_that_overlap_slow_each_other_down() -> None:
    async def play() -> list[float]:
        server = SharedServer(0.0, 1.0)
        return await asyncio.gather(served(server, 2), served(server, 2, after=1))

    # One unit alone, then both at half speed until the first is done, then the second alone.
    assert run_virtually(play()) == pytest.approx([3.0, 4.0])


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 5)), min_size=1, max_size=12))
def test_no_work_is_lost_or_made(jobs: list[tuple[float, float]]) -> None:
    async def play() -> tuple[float, int]:
        server = SharedServer(0.0, 1.0)
        await asyncio.gather(*(served(server, work, after) for work, after in jobs))
        return server.busy_seconds, server.jobs

    busy, left = run_virtually(play())
    assert busy == pytest.approx(sum(work for work, _ in jobs), rel=1e-6)
    assert left == 0


def test_a_swap_stops_every_job_for_its_time() -> None:
    async def play() -> float:
        server = SharedServer(0.0, 1.0)
        job = asyncio.ensure_future(served(server, 2))
        await asyncio.sleep(1)
        await server.hold(10)
        return await job

    assert run_virtually(play()) == pytest.approx(12.0)


def test_a_swap_that_is_broken_off_lets_jobs_go_on() -> None:
    async def play() -> float:
        server = SharedServer(0.0, 1.0)
        job = asyncio.ensure_future(served(server, 2))
        swap = asyncio.ensure_future(server.hold(10))
        await asyncio.sleep(1)
        swap.cancel()
        return await job

    assert run_virtually(play()) == pytest.approx(3.0)


def test_a_lost_server_says_what_was_left_of_each_job() -> None:
    async def play() -> list[float]:
        server = SharedServer(0.0, 1.0)
        jobs = [asyncio.ensure_future(server.serve(work)) for work in (2, 4)]
        await asyncio.sleep(2)  # a unit for each
        assert server.lose_jobs() == pytest.approx(2.0)
        return [lost.undone for lost in await asyncio.gather(*jobs, return_exceptions=True)]  # type: ignore[union-attr]

    assert run_virtually(play()) == pytest.approx([1.0, 3.0])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_a_router_finds_the_least_loaded_server_that_is_up(moves: list[tuple[int, bool]]) -> None:
    async def play() -> None:
        servers = [SharedServer(0.0, 1.0) for _ in range(4)]
        router, up, jobs = Router(servers), set(range(4)), []
        for place, comes_up in moves:
            (router.bring_up if comes_up else router.take_down)(servers[place])
            (up.add if comes_up else up.discard)(place)
            if up:
                least = await router.least_loaded()
                assert least is servers[min(up, key=lambda each: (servers[each].jobs, each))]
                jobs.append(asyncio.ensure_future(least.serve(5)))
                await asyncio.sleep(0.5)

    run_virtually(play())


def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    async def play() -> float:
        server = SharedServer(0.0, 1.0)
        gone = asyncio.ensure_future(server.serve(1))
        stays = asyncio.ensure_future(served(server, 1))
        await asyncio.sleep(0.5)
        gone.cancel()
        return await stays

    assert run_virtually(play()) == pytest.approx(2.0)


def test_servers_of_one_machine_share_its_cores() -> None:
    async def play() -> list[float]:
        machine = Machine(2)
        return await asyncio.gather(*(served(SharedServer(0.0, 1.0, machine), work) for work in (1, 1, 2)))

    # Three on two cores: 2/3 speed until 1.5 s, then the last has a core of its own.
    assert run_virtually(play()) == pytest.approx([1.5, 1.5, 2.5])
