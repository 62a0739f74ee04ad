"""Results on their way from a pool's threads to an event loop, which is woken once for as many as have come.

Waking a loop costs a system call and a fight for the interpreter; one per result would cost more than a small call.
"""

import asyncio
from collections import deque
from concurrent.futures import Future
from typing import Any


class LoopInbox:
    """Of one loop. Invariant: while something is in `_arrived`, a `_deliver` is due in the loop."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._due = False

    async def result(self, future: "Future[Any]") -> Any:
        """What `future` ends with, awaited in the running loop. Cancelling this cancels it."""
        waiter = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: self._put(waiter, done))
        try:
            return await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise

    def _put(self, waiter: "asyncio.Future[Any]", done: "Future[Any]") -> None:
        loop = waiter.get_loop()
        if loop.is_closed():
            return
        self._arrived.append((waiter, done))
        # Two threads may both find it not due: then it runs once in vain.
        if not self._due:
            self._due = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._due = False  # before looking, so that what comes from now on is delivered by another
        while self._arrived:
            waiter, done = self._arrived.popleft()
            if waiter.done():
                continue  # cancelled
            error = done.exception()
            if error is None:
                waiter.set_result(done.result())
            else:
                waiter.set_exception(error)
