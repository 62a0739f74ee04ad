"""An answer on its way out, whole or while it is generated. Until its first byte it may still become a plain failure.

The answer itself is a flight, which others may listen to as well; what is delivered here is one client's copy of it.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from areal.proxy.attendance import Attendance
from areal.proxy.errors import ApiError, ClientGone
from areal.proxy.exchange import CallMade, Event, EventWriter, Reply
from areal.proxy.flights import Flight
from areal.trajectory.parsers.events import Reasoning, Text

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Delivery(Response):
    def __init__(
        self,
        claim: Callable[[], Flight],
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
    async def _deliver(self, flight: Flight, send: Send) -> None: ...

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

    async def _deliver(self, flight: Flight, send: Send) -> None:
        body = orjson.dumps(self._render(await flight.arrival()))
        await self._begin(send, [*JSON, (b"content-length", str(len(body)).encode())])
        await send(_body(body, more=False))

    def _broken(self, failure: ApiError) -> bytes:
        return b""


class EventStream(Delivery):
    def __init__(self, writer: EventWriter, *common: Any) -> None:
        super().__init__(*common)
        self._writer = writer

    async def _deliver(self, flight: Flight, send: Send) -> None:
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
