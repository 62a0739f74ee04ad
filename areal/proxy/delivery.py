"""Somebody listens to the answer: while a call runs, its client going away, or its session ending, cancels it."""

# MERGED-DOC
# An answer on its way out, whole or while it is generated. Until its first byte it may still become a plain failure.
#
# The answer itself is a flight, which others may listen to as well; what is delivered here is one client's copy of it.

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from areal.proxy.errors import ApiError, ClientGone, session_ended
from areal.proxy.retries import SharedAnswer
from areal.proxy.sessions import Session, too_many_calls
from areal.proxy.types import CallMade, Event, EventWriter, Reply
from areal.trajectory.parsers.base import Reasoning, Text


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


JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Delivery(Response):
    def __init__(
        self,
        claim: Callable[[], SharedAnswer],
        attendance: Attendance,
        explain: Callable[[Exception], ApiError],
        fail: Callable[[ApiError], Response],
    ) -> None:
        """`claim` finds the flight; `explain` makes a failure an answer, `fail` writes one before any byte."""
        self._claim = claim
        self._attendance = attendance
        self._explain = explain
        self._fail = fail
        self._began = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._claim() as flight:
                with self._attendance:
                    await self._deliver(flight, send)
                    flight.delivered()
        except ClientGone:
            return
        except Exception as error:
            failure = self._explain(error)
            if not self._began:
                await self._fail(failure)(scope, receive, send)
                return
            await send(_body(self._broken(failure), more=False))

    @abstractmethod
    async def _deliver(self, flight: SharedAnswer, send: Send) -> None: ...

    @abstractmethod
    def _broken(self, failure: ApiError) -> bytes:
        """How a failure ends an answer that has begun."""

    async def _begin(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._began = True


class WholeAnswer(Delivery):
    def __init__(self, render: Callable[[Reply], dict[str, Any]], *common: Any) -> None:
        super().__init__(*common)
        self._render = render

    async def _deliver(self, flight: SharedAnswer, send: Send) -> None:
        body = orjson.dumps(self._render(await flight.arrival()))
        await self._begin(send, [*JSON, (b"content-length", str(len(body)).encode())])
        await send(_body(body, more=False))

    def _broken(self, failure: ApiError) -> bytes:
        return b""


class EventStream(Delivery):
    def __init__(self, writer: EventWriter, *common: Any) -> None:
        super().__init__(*common)
        self._writer = writer

    async def _deliver(self, flight: SharedAnswer, send: Send) -> None:
        async with aclosing(flight.events()) as events:
            async for event in events:
                if not self._began:
                    await self._begin(send, EVENTS)
                # The last event is the end of the body too: clients stop reading behind it.
                last = isinstance(event, Reply) and bool(event.choices)
                await send(_body(_written(self._writer, event), more=not last))
                if last:
                    return

    def _broken(self, failure: ApiError) -> bytes:
        return self._writer.failure(failure)


def _written(writer: EventWriter, event: Event) -> bytes:
    if isinstance(event, Text):
        return writer.text(event.text)
    if isinstance(event, Reasoning):
        return writer.reasoning(event.text)
    if isinstance(event, CallMade):
        return writer.call(event)
    assert isinstance(event, Reply)
    return writer.end(event) if event.choices else writer.begin(event)


def _body(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
