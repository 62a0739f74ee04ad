"""One call, from the claim of its answer to the last byte that its client gets.

A call is cancelled when its client disconnects or its session ends. Until the first byte is sent any failure is a plain
error response; afterwards it ends the stream. The answer itself is a `SharedAnswer`, which retries of the call may be
listening to as well; what is delivered here is one client's copy of it.
"""

import asyncio
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from areal.proxy.dialects.base import Dialect
from areal.proxy.errors import ApiError, as_api_error, session_ended
from areal.proxy.generation import Generation
from areal.proxy.retries import Attempt, SharedAnswer
from areal.proxy.sessions import Session
from areal.proxy.tracing import traced
from areal.proxy.types import Call, Choice, Event, EventWriter, Reply, Tokens, ToolCallEvent
from areal.trajectory.parsers.base import Reasoning, Text

JSON_TYPE = (b"content-type", b"application/json")
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


WholeAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers and body."""


class Delivery:
    """Answers one call: as an ASGI app, or at once to a client in this process."""

    def __init__(
        self, generation: Generation, dialect: Dialect, session: Session, call: Call, attempt: Attempt
    ) -> None:
        self._generation = generation
        self._dialect = dialect
        self._session = session
        self._call = call
        self._attempt = attempt
        self._writer = dialect.writer(call) if call.stream else None
        self._began = False

    @property
    def streams(self) -> bool:
        """The answer comes in parts, so only the ASGI app gives it."""
        return self._writer is not None

    async def whole(self) -> WholeAnswer:
        """For a client in this process, which leaves by cancelling its own task. The client has it on return."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._claim() as answer:
                body = self._written_whole(await self._wait_for(answer, over))
                answer.delivered()
        except Exception as error:
            return whole_error(self._dialect, as_api_error(error))
        finally:
            over.set_result(None)
        return 200, _json_headers(body), body

    async def _wait_for(self, answer: SharedAnswer, over: "asyncio.Future[None]") -> Reply:
        """Raises ApiError 410 if the session ends. The client's task goes on then, so only its wait is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        try:
            while answer.running:
                news = answer.news()
                self._session.calls[over] = news.cancel
                await news
            return answer.result()
        except asyncio.CancelledError:
            if task.cancelling() > cancelled_before or not self._session.ended:
                raise
            raise session_ended() from None
        finally:
            self._session.calls.pop(over, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._claim() as answer:
                await self._send_while_connected(answer, receive, send, over)
        except _ClientGone:
            return
        except Exception as error:
            failure = as_api_error(error)
            if self._began:
                await send(_body(b"" if self._writer is None else self._writer.failure(failure)))
            else:
                await error_response(self._dialect, failure)(scope, receive, send)
        finally:
            over.set_result(None)

    def _claim(self) -> SharedAnswer:
        retries = self._session.retries
        try:
            self._session.require_room_for_call()
        except ApiError:
            retries.note_refused(self._attempt)
            raise
        return retries.claim(self._attempt, self._begin_answer)

    def _begin_answer(self) -> SharedAnswer:
        session, call = self._session, self._call
        events = self._generation.events(session, call)
        if session.trace is not None:
            events = traced(session.trace, session.name, call.model or self._generation.model_name, call, events)
        return SharedAnswer(events)

    async def _send_while_connected(
        self, answer: SharedAnswer, receive: Receive, send: Send, over: "asyncio.Future[None]"
    ) -> None:
        """Send the answer while its client is connected and its session is open. Raises _ClientGone or ApiError 410."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(_cancel_on_disconnect(task, receive))
        self._session.calls[over] = task.cancel
        try:
            if self._writer is None:
                await self._send_whole(answer, send)
            else:
                await self._send_events(answer, self._writer, send)
            answer.delivered()
        except asyncio.CancelledError:
            if not self._session.ended and not watch.done():
                raise
            task.uncancel()  # the cancellation was for this call alone, and ends here
            raise (session_ended() if self._session.ended else _ClientGone()) from None
        finally:
            del self._session.calls[over]
            watch.cancel()

    async def _send_whole(self, answer: SharedAnswer, send: Send) -> None:
        body = self._written_whole(await answer.whole())
        await self._send_head(send, _json_headers(body))
        await send(_body(body))

    def _written_whole(self, reply: Reply) -> bytes:
        return orjson.dumps(self._dialect.render(self._call, reply))

    async def _send_events(self, answer: SharedAnswer, writer: EventWriter, send: Send) -> None:
        async with aclosing(answer.events()) as events:
            async for event in events:
                if not self._began:
                    await self._send_head(send, STREAM_HEADERS)
                # The last event also ends the body: clients stop reading after it.
                last = isinstance(event, Reply) and bool(event.choices)
                body = _written(writer, event)
                if body or last:
                    await send(_body(body, more=not last))
                if last:
                    return

    async def _send_head(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._began = True


class _ClientGone(Exception):
    """The client has disconnected, so there is no one to answer."""


async def _cancel_on_disconnect(task: asyncio.Task[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _written(writer: EventWriter, event: Event) -> bytes:
    if isinstance(event, Text):
        return writer.text(event.text)
    if isinstance(event, Reasoning):
        return writer.reasoning(event.text)
    if isinstance(event, ToolCallEvent):
        return writer.tool_call(event)
    if isinstance(event, Tokens):
        return writer.tokens(event.tokens)
    if isinstance(event, Choice):
        return writer.choice(event.number)
    return writer.end(event) if event.choices else writer.begin(event)


def _body(body: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [JSON_TYPE, (b"content-length", str(len(body)).encode())]


def error_response(dialect: Dialect, failure: ApiError) -> Response:
    body = orjson.dumps(dialect.error(failure))
    return Response(body, failure.status, headers=failure.headers, media_type="application/json")


def whole_error(dialect: Dialect, failure: ApiError) -> WholeAnswer:
    response = error_response(dialect, failure)
    return response.status_code, response.raw_headers, bytes(response.body)
