"""One connection between two processes, over which each may call the other, with many calls in flight.

Invariants:
- a call ends in exactly one way: an answer, the remote error, its deadline, or `ChannelClosed`;
- a caller that stops waiting (deadline, cancellation) cancels the handler at the other end;
- when the peer is gone, pending calls fail, its handlers here are cancelled, and `closed` resolves;
- messages sent in one tick of the loop leave in one sealed frame (frames.py), or in several if they are large;
- a frame that the peer did not seal ends the channel, and nothing of it is looked at;
- calls and answers wait while the peer reads too slowly.

Asynchronous handlers run as tasks that the channel owns; a future that one returns is answered for when it is done, and
cancelled like a task. Synchronous ones run inside the reader, so they must return at
once and little. An exception crosses the channel as itself if it is one of `areal.api.errors`, else as `RemoteError`.
A channel never reconnects: a new connection is a new channel.
"""

import asyncio
import inspect
import itertools
import struct
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from areal.api import errors
from areal.api.errors import ArealError
from areal.infra.rpc.frames import MAX_FRAME_BYTES, FrameError, Opener, Sealer, Seals
from areal.infra.rpc.wire import Wire
from areal.utils.logging import getLogger

HEADER = struct.Struct(">IBQ")
"""Payload length, kind, call id."""
CHUNK_BYTES = 1 << 18
FLUSH_BYTES = 1 << 18
UNSENT_BYTES = 1 << 20
CLOSE_SECONDS = 5.0
logger = getLogger("channel")

Handler = Callable[..., Any]
"""Called with the caller's arguments; returns the answer, or an awaitable of it."""


class ChannelClosed(ArealError):
    """The process at the other end is gone, or the channel was closed here."""


class RemoteError(ArealError):
    """A handler at the other end raised something that is not one of our errors."""

    def __init__(self, peer: str, type_name: str, text: str, remote_traceback: str) -> None:
        super().__init__(f"{peer}: {type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note(f"\nraised in {peer}:\n{remote_traceback}")


class Channel:
    """Made by `connect` and `serve` (rpc/connect.py) inside a running event loop, to which it belongs."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seals: Seals,
        wire: Wire,
        peer: str,
        handlers: Mapping[str, Handler] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.peer = peer
        """Who is at the other end, for messages to people."""
        self.role = ""
        """What the peer has proved to be, if it is less than one who knows the listener's own secret (`serve`)."""
        self.handlers: dict[str, Handler] = dict(handlers or {})
        """What the peer may call; the owner may add to it."""
        sealer, opener = seals
        self._messages = _MessageWriter(writer, sealer, max_frame_bytes)
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._reading = self._loop.create_task(
            self._read(reader, _MessageReader(opener, max_frame_bytes)), name=f"read from {peer}"
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
        request = self._wire.pack([method, *args])
        if timeout_seconds is None:
            return await self._ask(request)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._ask(request)
        except TimeoutError:
            raise TimeoutError(f"{self.peer} did not answer {method!r} within {timeout_seconds} s") from None

    async def _ask(self, request: bytes) -> Any:
        self._require_open()
        if self.is_full:
            await self.drain()
        call_id = next(self._ids)
        self._messages.send(_Kind.CALL, call_id, request)
        answer = self._waiting[call_id] = self._loop.create_future()
        try:
            return await answer
        finally:
            if self._waiting.pop(call_id, None) is not None and self.is_open:
                self._messages.send(_Kind.CANCEL, call_id)

    def notify(self, method: str, *args: Any) -> None:
        """Run the peer's handler `method` without waiting. Between many of these, await `drain()`."""
        self._require_open()
        self._messages.send(_Kind.NOTIFY, 0, self._wire.pack([method, *args]))

    @property
    def is_full(self) -> bool:
        """Much is unsent because the peer reads too slowly: `drain` would wait."""
        return self._messages.is_full

    async def drain(self) -> None:
        """Wait while much is unsent because the peer reads too slowly."""
        self._require_open()
        with suppress(ConnectionError):  # the next line raises ChannelClosed for it
            await self._messages.drain()
        self._require_open()

    async def close(self) -> None:
        """Send what is queued, then end both directions."""
        self._end("it was closed at this end")
        tasks = self._tasks | {self._reading}
        if others := tasks - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=CLOSE_SECONDS)
        await self._messages.wait_closed(CLOSE_SECONDS)

    def _require_open(self) -> None:
        if not self.is_open:
            raise ChannelClosed(f"the channel to {self.peer} is closed: {self._closed.result()}")

    async def _read(self, reader: asyncio.StreamReader, messages: "_MessageReader") -> None:
        reason = "the peer disconnected"
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                for message in messages.feed(chunk):
                    self._receive(message)
            messages.end()
        except (OSError, FrameError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _receive(self, message: "_Message") -> None:
        if message.kind in (_Kind.CALL, _Kind.NOTIFY):
            self._handle(message)
        elif message.kind is _Kind.CANCEL:
            if (task := self._running.pop(message.call_id, None)) is not None:
                task.cancel()
        elif (answer := self._waiting.pop(message.call_id, None)) is not None and not answer.done():
            self._resolve(answer, message)

    def _resolve(self, answer: asyncio.Future[Any], message: "_Message") -> None:
        try:
            content = self._wire.unpack(message.payload)
        except Exception as error:
            answer.set_exception(error)
            return
        if message.kind is _Kind.RESULT:
            answer.set_result(content)
        else:
            answer.set_exception(_load_error(self.peer, content))

    def _handle(self, message: "_Message") -> None:
        try:
            method, *args = self._wire.unpack(message.payload)
            outcome = self._handler(method)(*args)
        except Exception as error:
            self._answer_error(message, error)
            return
        if inspect.isawaitable(outcome):
            self._start(message, outcome)
        else:
            self._answer(message, outcome)

    def _handler(self, method: str) -> Handler:
        if method not in self.handlers:
            raise LookupError(f"there is no handler {method!r}; there are {sorted(self.handlers)}")
        return self.handlers[method]

    def _start(self, message: "_Message", outcome: Awaitable[Any]) -> None:
        if isinstance(outcome, asyncio.Future):
            task: asyncio.Future[Any] = outcome
            task.add_done_callback(partial(self._ended, message))
        else:
            task = self._loop.create_task(self._run(message, outcome))
            task.add_done_callback(partial(self._forget, outcome))
        self._tasks.add(task)
        if message.kind is _Kind.CALL:
            self._running[message.call_id] = task

    def _forget(self, outcome: Awaitable[Any], task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if inspect.iscoroutine(outcome):
            outcome.close()  # of a task that was cancelled before its first step, it has not begun

    def _ended(self, message: "_Message", outcome: asyncio.Future[Any]) -> None:
        """Answer with what a handler's future has come to."""
        self._tasks.discard(outcome)
        is_awaited = self._running.pop(message.call_id, None) is not None
        if outcome.cancelled():
            if is_awaited:  # it cancelled itself: the caller still waits
                self._answer_error(message, asyncio.CancelledError())
        elif (error := outcome.exception()) is not None:
            self._answer_error(message, error)
        elif self.is_full and self.is_open:
            self._start(message, _done(outcome.result()))
        else:
            self._answer(message, outcome.result())

    async def _run(self, message: "_Message", outcome: Awaitable[Any]) -> None:
        try:
            result = await outcome
        except asyncio.CancelledError as error:
            if message.call_id in self._running:  # it cancelled itself: the caller still waits
                self._answer_error(message, error)
            raise
        except Exception as error:
            self._answer_error(message, error)
        else:
            with suppress(ChannelClosed):  # the caller is gone
                await self.drain()
                self._answer(message, result)
        finally:
            self._running.pop(message.call_id, None)

    def _answer(self, message: "_Message", result: Any) -> None:
        if message.kind is _Kind.NOTIFY or not self.is_open:
            return
        try:
            self._messages.send(_Kind.RESULT, message.call_id, self._wire.pack(result))
        except Exception as error:
            self._answer_error(message, error)

    def _answer_error(self, message: "_Message", error: BaseException) -> None:
        if message.kind is _Kind.NOTIFY:
            logger.error("a message from %s failed", self.peer, exc_info=error)
        elif self.is_open:
            self._messages.send(_Kind.ERROR, message.call_id, self._wire.pack(_dump_error(error)))

    def _end(self, reason: str) -> None:
        """Fail what waits here, cancel what runs here, and let the transport send what is queued."""
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
        self._messages.close()


async def _done(result: Any) -> Any:
    return result


def _dump_error(error: BaseException) -> list[str]:
    name = type(error).__name__
    if _known(name) is type(error):
        return [name, str(error), ""]
    return [name, str(error), "".join(traceback.format_exception(error))]


def _load_error(peer: str, dumped: list[str]) -> ArealError:
    name, text, remote_traceback = dumped
    known = _known(name)
    if known is not None and not remote_traceback:
        return known(text)
    return RemoteError(peer, name, text, remote_traceback)


def _known(name: str) -> type[ArealError] | None:
    return getattr(errors, name) if name in errors.__all__ else None


class _Kind(IntEnum):
    CALL = 1
    """[method, *arguments]; an answer is wanted."""
    NOTIFY = 2
    """[method, *arguments]; no answer is wanted."""
    RESULT = 3
    """What a call returned."""
    ERROR = 4
    """What a call raised: [class name, text, traceback]."""
    CANCEL = 5
    """Empty: the caller no longer waits."""


class _Message(NamedTuple):
    kind: _Kind
    call_id: int
    payload: bytes


class _MessageWriter:
    """Gathers the messages of one tick of the event loop and sends them as one frame."""

    def __init__(self, writer: asyncio.StreamWriter, sealer: Sealer, max_bytes: int) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._sealer = sealer
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0

    def send(self, kind: _Kind, call_id: int, payload: bytes = b"") -> None:
        if len(payload) > self._max_bytes:
            raise FrameError(
                f"a message must be at most {self._max_bytes} bytes, got {len(payload)}; send it in parts or by file"
            )
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered += (HEADER.pack(len(payload), kind, call_id), payload)
        self._gathered_bytes += HEADER.size + len(payload)
        if self._gathered_bytes > FLUSH_BYTES:  # the transport must see it, or `drain` would let the whole tick through
            self._flush()

    @property
    def is_full(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > UNSENT_BYTES

    async def drain(self) -> None:
        """Wait while more than `UNSENT_BYTES` are unsent."""
        # All waiters wake together, so each looks again: the first of them may have filled the buffer.
        while self.is_full:
            await self._writer.drain()

    def close(self) -> None:
        """Let the transport close once it has sent everything; `wait_closed` waits for that."""
        self._flush()
        self._writer.close()

    async def wait_closed(self, timeout_seconds: float) -> None:
        """Wait until all is sent; a peer that does not read in time loses the rest."""
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_seconds)
        except TimeoutError:
            self._writer.transport.abort()
        except ConnectionError:
            return  # it is closed all the same

    def _flush(self) -> None:
        if self._gathered and not self._writer.is_closing():
            self._writer.write(self._sealer.seal(b"".join(self._gathered)))
        self._gathered.clear()
        self._gathered_bytes = 0


class _MessageReader:
    """Opens the peer's frames and takes them apart into messages."""

    def __init__(self, opener: Opener, max_bytes: int) -> None:
        self._opener = opener
        opener.max_bytes = FLUSH_BYTES + HEADER.size + max_bytes  # what a writer gathers at most, and one message more
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> Iterator[_Message]:
        """The messages that `chunk` completes."""
        for content in self._opener.feed(chunk):
            start = 0
            while start < len(content):
                begin = start + HEADER.size
                size, kind, call_id = HEADER.unpack_from(content, start) if begin <= len(content) else (0, 0, 0)
                self._check(size, kind)
                start = begin + size
                yield _Message(_Kind(kind), call_id, content[begin:start])

    def end(self) -> None:
        """The peer sends no more; raises FrameError if it was cut off."""
        if not self._opener.is_between_frames:
            raise FrameError("the peer disconnected in the middle of a frame")

    def _check(self, size: int, kind: int) -> None:
        if size > self._max_bytes:
            raise FrameError(f"a message must be at most {self._max_bytes} bytes, the peer announced {size}")
        if not _Kind.CALL <= kind <= _Kind.CANCEL:
            raise FrameError(f"a message's kind must lie in 1..5, the peer sent {kind}; it speaks another protocol")
