import asyncio
import threading
from contextvars import ContextVar

import pytest

from areal.utils.background import Background, in_thread

WAIT_SECONDS = 10


async def test_what_a_function_returns_or_raises_comes_back() -> None:
    background = Background(1, "work")
    assert await background.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await background.run(divmod, 7, 0)


async def test_function_sees_the_context_of_its_caller() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("mine")
    assert await Background(1, "work").run(variable.get) == "mine"


async def test_work_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """Only daemons do not: the interpreter waits for every other thread, also for those of `asyncio.to_thread`."""
    assert (await Background(1, "work").run(threading.current_thread)).daemon


async def test_cancelled_work_keeps_its_place_until_it_is_done_and_waiting_work_never_begins() -> None:
    background = Background(1, "work")
    held, began, begun = threading.Event(), threading.Event(), []

    def hold() -> None:
        began.set()
        assert held.wait(WAIT_SECONDS)

    first = asyncio.ensure_future(background.run(hold))
    assert await asyncio.to_thread(began.wait, WAIT_SECONDS)
    waiting, last = (asyncio.ensure_future(background.run(begun.append, name)) for name in ("waiting", "last"))
    first.cancel()
    waiting.cancel()
    done, _ = await asyncio.wait([first, waiting], timeout=WAIT_SECONDS)
    assert len(done) == 2
    assert begun == []
    held.set()
    async with asyncio.timeout(WAIT_SECONDS):
        await last
    assert begun == ["last"]


async def test_calls_in_threads_of_their_own_do_not_wait_for_one_that_hangs() -> None:
    released = threading.Event()
    hanging = [asyncio.ensure_future(in_thread(released.wait, WAIT_SECONDS)) for _ in range(50)]
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("mine")
    assert await asyncio.wait_for(in_thread(variable.get), WAIT_SECONDS) == "mine"
    assert (await in_thread(threading.current_thread)).daemon
    with pytest.raises(SystemExit):
        await in_thread(exit, 3)
    released.set()
    assert await asyncio.gather(*hanging) == [True] * 50
