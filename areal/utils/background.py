"""Work that takes too long for the event loop, done in threads that never keep a process from ending."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function returns or raises, called in a thread of its own: calls that hang cannot hold up others."""
    return await _in_thread(lambda: function(*args, **kwargs), "areal in thread")


class Background:
    """Runs at most `at_once` functions at a time; the rest queue. Belongs to one event loop.

    Python cannot end a thread, so work whose caller was cancelled goes on and keeps its place until it is done. Work
    that has not begun by then never does.
    """

    def __init__(self, at_once: int, name: str) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._name = name

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns or raises, called in a thread."""
        await self._free.acquire()
        return await _in_thread(lambda: function(*args, **kwargs), self._name, self._free.release)


class OwnThread:
    """One thread that calls functions in the order in which they come, until `end`. Belongs to one event loop."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns or raises; it is called even if whoever waits for it is cancelled."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Callable[[], T]] = loop.create_future()

        def deliver(result: Callable[[], T]) -> None:
            if not outcome.done():
                outcome.set_result(result)

        def work() -> None:
            result = _outcome(lambda: function(*args, **kwargs))
            with suppress(RuntimeError):  # the loop is closed: nothing waits for this any more
                loop.call_soon_threadsafe(deliver, result)

        self._waiting.put(work)
        return (await outcome)()

    def end(self, last: Callable[[], None] = lambda: None) -> None:
        """After what it has been given, and after `last`, which must not raise; nothing waits for that."""
        self._waiting.put(last)
        self._waiting.put(None)

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()


async def _in_thread(function: Callable[[], T], name: str, ended: Callable[[], None] = lambda: None) -> T:
    """Call it in a thread, in the caller's context; `ended` is called in the event loop when the thread is done.

    The thread is a daemon: `asyncio.to_thread` would make the process wait for it.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Callable[[], T]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Callable[[], T]) -> None:
        ended()
        if not outcome.done():
            outcome.set_result(result)

    def work() -> None:
        result = _outcome(lambda: context.run(function))
        with suppress(RuntimeError):  # the loop is closed: nothing waits for this any more
            loop.call_soon_threadsafe(deliver, result)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except BaseException:
        ended()
        raise
    return (await outcome)()


def _outcome(function: Callable[[], T]) -> Callable[[], T]:
    """Call it now; what it returned or raised comes when the outcome is called."""
    try:
        value = function()
    except BaseException as error:  # raised where it is awaited
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: value
