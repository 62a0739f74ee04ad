"""The virtual clock: code that waits is unchanged, and takes no time."""

import asyncio

import pytest

from areal.simulation.scenario import run_virtually


def test_a_day_passes_without_waiting() -> None:
    async def day() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert run_virtually(day()) == pytest.approx(86_400)


def test_timers_fire_in_order_of_their_time() -> None:
    fired = []

    async def late(seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((seconds, asyncio.get_running_loop().time()))

    async def all_of_them() -> None:
        await asyncio.gather(*(late(seconds) for seconds in (3.0, 1.0, 2.0)))

    run_virtually(all_of_them())
    assert fired == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_a_time_out_means_virtual_seconds() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        run_virtually(impatient())


def test_waiting_for_what_never_happens_is_an_error() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never happen"):
        run_virtually(forever())
