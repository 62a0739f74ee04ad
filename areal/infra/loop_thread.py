"""An event loop for synchronous code that owns asynchronous parts."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 10.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str = "areal event loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        return self._thread.ident or 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it here; an interrupted wait cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` there, without waiting."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function` there soon, without waiting; safe in a signal handler."""
        self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel what is left and end the thread."""
        if self.loop.is_closed():
            return
        self.begin(self._cancel_all()).result(CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
