"""What a part waits for is known while it waits, and to no other part."""

import asyncio
import threading

import pytest

from areal.utils import waits
from areal.utils.waits import Waits


def told(part: Waits) -> list[str]:
    return [str(wait.what) for wait in part.now()]


def test_a_wait_is_there_while_its_block_runs() -> None:
    part = Waits()
    with part.entered("waits for one"), part.entered("waits for two"):
        assert told(part) == ["waits for one", "waits for two"]
    assert told(part) == []


def test_a_wait_that_is_broken_off_is_over() -> None:
    part = Waits()
    with pytest.raises(KeyError), part.entered("waits"):
        raise KeyError
    assert told(part) == []


def test_what_happens_meanwhile_puts_the_deadline_off() -> None:
    with Waits().entered("waits", 60.0) as wait:
        first = wait.until
        wait.put_off()
        assert first is not None
        assert wait.until is not None
        assert first <= wait.until
    with Waits().entered("waits") as wait:
        wait.put_off()
        assert wait.until is None


async def test_waits_of_tasks_are_those_of_the_part_that_started_them() -> None:
    entered, parts = asyncio.Event(), [Waits(), Waits()]

    async def wait_for(what: str) -> None:
        with waits.current().entered(what):
            entered.set()
            await asyncio.Event().wait()

    tasks = []
    for number, part in enumerate(parts):
        with waits.of(part):
            tasks.append(asyncio.create_task(wait_for(f"waits for {number}")))
    await asyncio.wait_for(entered.wait(), 20)
    await asyncio.sleep(0)
    assert [told(part) for part in parts] == [["waits for 0"], ["waits for 1"]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [told(part) for part in parts] == [[], []]


def test_waits_follow_work_to_the_event_loop_of_another_thread() -> None:
    from areal.infra.loop_thread import LoopThread

    part, loop, entered = Waits(), LoopThread(), threading.Event()

    async def work() -> None:
        with waits.current().entered("waits elsewhere"):
            entered.set()
            await asyncio.Event().wait()

    with waits.of(part):
        future = loop.begin(work())
    assert entered.wait(20)
    assert told(part) == ["waits elsewhere"]
    future.cancel()
    loop.close()
