"""Somebody listens to the answer: while a call runs, its client going away, or its session ending, cancels it."""

import asyncio
from types import TracebackType
from typing import Any

from starlette.types import Receive

from areal.proxy.errors import ClientGone, session_ended
from areal.proxy.sessions import Session, too_many_calls


class Attendance:
    """A block of the task that answers. Such a cancellation leaves it as ApiError 410 or ClientGone."""

    def __init__(self, session: Session, receive: Receive, max_calls: int) -> None:
        self._session = session
        self._receive = receive
        self._max_calls = max_calls

    def check(self) -> None:
        """Raises ApiError where one more call may not begin."""
        if self._session.ended:  # while the body was on its way
            raise session_ended()
        if len(self._session.calls) >= self._max_calls:
            raise too_many_calls(self._max_calls)

    def __enter__(self) -> None:
        self.check()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener = asyncio.ensure_future(_cancel_when_gone(task, self._receive))
        self._session.calls.add(task)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.calls.discard(self._task)
        gone = self._listener.done()
        self._listener.cancel()
        if kind is asyncio.CancelledError and (self._session.ended or gone):
            self._task.uncancel()  # it was ours, and ends here
            raise (session_ended() if self._session.ended else ClientGone()) from None


async def _cancel_when_gone(task: asyncio.Task[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
