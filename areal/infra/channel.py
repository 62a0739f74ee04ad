"""One connection between two processes, over which each may call the other, with many calls in flight.

Invariants:
- a call ends in exactly one way: an answer, the remote error, its deadline, or `ChannelClosed`;
- a caller that stops waiting (deadline, cancellation) cancels the handler at the other end;
- when the peer goes, pending calls fail, its handlers here are cancelled, and `closed` resolves;
- frames sent in one tick of the loop leave in one write; calls and answers wait while the peer reads too slowly.

Asynchronous handlers run as tasks that the channel owns. Synchronous ones run inside the reader, so they must return at
once and little. It refuses to reconnect: a new connection is a new channel.
"""

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from areal.api.errors import ArealError
from areal.infra.frames import MAX_FRAME_BYTES, Frame, FrameBuffer, FrameError, FrameKind, FrameWriter
from areal.infra.remote_errors import RemoteError, dump_error, load_error
from areal.infra.wire import Wire
from areal.utils.logging import getLogger

__all__ = ["Channel", "ChannelClosed", "Handler", "RemoteError"]

Handler = Callable[..., Any]
"""Called with the caller's arguments; returns the answer, or an awaitable of it."""

CHUNK_BYTES = 1 << 18
CLOSE_SECONDS = 5.0
logger = getLogger("channel")


class ChannelClosed(ArealError):
    """The process at the other end is gone, or the channel was closed here."""


class Channel:
    """Made by `connect` and `serve` inside a running event loop, to which it belongs."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wire: Wire,
        peer: str,
        handlers: Mapping[str, Handler] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.peer = peer
        """Who is at the other end, for messages to people."""
        self.handlers: dict[str, Handler] = dict(handlers or {})
        """What the peer may call; the owner may add to it."""
        self._frames = FrameWriter(writer, max_frame_bytes)
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._reading = self._loop.create_task(
            self._read(reader, FrameBuffer(max_frame_bytes)), name=f"read from {peer}"
        )

    @property
    def closed(self) -> asyncio.Future[str]:
        """Await it to wait for the end; it gives the reason."""
        return asyncio.shield(self._closed)  # a waiter that is cancelled must not cancel it for the others

    @property
    def is_open(self) -> bool:
        return not self._closed.done()

    async def call(self, method: str, *args: Any, timeout_seconds: float | None) -> Any:
        """Run the peer's handler `method` and return its answer; None = the caller's own deadline governs."""
        call_id = next(self._ids)
        request = self._wire.pack([method, args])
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.drain()
                self._frames.send(FrameKind.CALL, call_id, request)
                answer = self._waiting[call_id] = self._loop.create_future()
                return await answer
        except TimeoutError:
            raise TimeoutError(f"{self.peer} did not answer {method!r} within {timeout_seconds} s") from None
        finally:
            if self._waiting.pop(call_id, None) is not None and self.is_open:
                self._frames.send(FrameKind.CANCEL, call_id)

    def notify(self, method: str, *args: Any) -> None:
        """Run the peer's handler `method` without waiting. Who sends much at once awaits `drain()` between."""
        self._require_open()
        self._frames.send(FrameKind.NOTIFY, 0, self._wire.pack([method, args]))

    async def drain(self) -> None:
        """Wait while much is unsent because the peer reads too slowly."""
        self._require_open()
        with suppress(ConnectionError):  # the next line says it in our words
            await self._frames.drain()
        self._require_open()

    async def close(self) -> None:
        """Send what is queued, then end both directions."""
        self._end("it was closed at this end")
        tasks = self._tasks | {self._reading}
        if others := tasks - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=CLOSE_SECONDS)
        await self._frames.wait_closed(CLOSE_SECONDS)

    def _require_open(self) -> None:
        if not self.is_open:
            raise ChannelClosed(f"the channel to {self.peer} is closed: {self._closed.result()}")

    async def _read(self, reader: asyncio.StreamReader, buffer: FrameBuffer) -> None:
        reason = "it went away"
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                for frame in buffer.feed(chunk):
                    self._receive(frame)
        except (OSError, FrameError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _receive(self, frame: Frame) -> None:
        if frame.kind in (FrameKind.CALL, FrameKind.NOTIFY):
            self._handle(frame)
        elif frame.kind is FrameKind.CANCEL:
            if (task := self._running.pop(frame.call_id, None)) is not None:
                task.cancel()
        elif (answer := self._waiting.pop(frame.call_id, None)) is not None and not answer.done():
            self._resolve(answer, frame)

    def _resolve(self, answer: asyncio.Future[Any], frame: Frame) -> None:
        try:
            content = self._wire.unpack(frame.payload)
        except Exception as error:
            answer.set_exception(error)
            return
        if frame.kind is FrameKind.RESULT:
            answer.set_result(content)
        else:
            answer.set_exception(load_error(self.peer, content))

    def _handle(self, frame: Frame) -> None:
        try:
            method, args = self._wire.unpack(frame.payload)
            outcome = self._handler(method)(*args)
        except Exception as error:
            self._answer_error(frame, error)
            return
        if inspect.isawaitable(outcome):
            self._start(frame, outcome)
        else:
            self._answer(frame, outcome)

    def _handler(self, method: str) -> Handler:
        if method not in self.handlers:
            raise LookupError(f"there is no handler {method!r}; there are {sorted(self.handlers)}")
        return self.handlers[method]

    def _start(self, frame: Frame, outcome: Awaitable[Any]) -> None:
        task = self._loop.create_task(self._run(frame, outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if frame.kind is FrameKind.CALL:
            self._running[frame.call_id] = task

    async def _run(self, frame: Frame, outcome: Awaitable[Any]) -> None:
        try:
            result = await outcome
        except asyncio.CancelledError as error:
            if frame.call_id in self._running:  # it cancelled itself: the caller still waits
                self._answer_error(frame, error)
            raise
        except Exception as error:
            self._answer_error(frame, error)
        else:
            with suppress(ChannelClosed):  # nobody is left to be answered
                await self.drain()
                self._answer(frame, result)
        finally:
            self._running.pop(frame.call_id, None)

    def _answer(self, frame: Frame, result: Any) -> None:
        if frame.kind is FrameKind.NOTIFY or not self.is_open:
            return
        try:
            self._frames.send(FrameKind.RESULT, frame.call_id, self._wire.pack(result))
        except Exception as error:
            self._answer_error(frame, error)

    def _answer_error(self, frame: Frame, error: BaseException) -> None:
        if frame.kind is FrameKind.NOTIFY:
            logger.error("a message from %s failed", self.peer, exc_info=error)
        elif self.is_open:
            self._frames.send(FrameKind.ERROR, frame.call_id, self._wire.pack(dump_error(error)))

    def _end(self, reason: str) -> None:
        if not self.is_open:
            return
        self._closed.set_result(reason)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ChannelClosed(f"the channel to {self.peer} is closed: {reason}"))
        self._waiting.clear()
        self._running.clear()
        for task in (self._tasks | {self._reading}) - {asyncio.current_task()}:
            task.cancel()
        self._frames.close()
