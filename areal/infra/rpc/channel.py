"""One connection between two processes, over which each may call the other, with many calls in flight.

Invariants:
- a call ends in exactly one way: an answer, the remote error, its deadline, or `ChannelClosed`;
- a caller that stops waiting (deadline, cancellation) cancels the handler at the other end;
- when the peer is gone, pending calls fail, its handlers here are cancelled, and `closed` resolves;
- frames sent in one tick of the loop leave in one write; calls and answers wait while the peer reads too slowly.

Asynchronous handlers run as tasks that the channel owns. Synchronous ones run inside the reader, so they must return at
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
from typing import Any, NamedTuple

from areal.api import errors
from areal.api.errors import ArealError
from areal.infra.rpc.wire import Wire
from areal.utils.logging import getLogger

HEADER = struct.Struct(">IBQ")
"""Payload length, kind, call id."""
MAX_FRAME_BYTES = 256 << 20
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


class FrameError(ValueError):
    """A frame that is too large, or bytes that are not a frame."""


class Channel:
    """Made by `connect` and `serve` (rpc/connect.py) inside a running event loop, to which it belongs."""

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
        self._frames = _FrameWriter(writer, max_frame_bytes)
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._reading = self._loop.create_task(
            self._read(reader, _FrameBuffer(max_frame_bytes)), name=f"read from {peer}"
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
        request = self._wire.pack([method, *args])
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.drain()
                self._frames.send(_FrameKind.CALL, call_id, request)
                answer = self._waiting[call_id] = self._loop.create_future()
                return await answer
        except TimeoutError:
            raise TimeoutError(f"{self.peer} did not answer {method!r} within {timeout_seconds} s") from None
        finally:
            if self._waiting.pop(call_id, None) is not None and self.is_open:
                self._frames.send(_FrameKind.CANCEL, call_id)

    def notify(self, method: str, *args: Any) -> None:
        """Run the peer's handler `method` without waiting. Between many of these, await `drain()`."""
        self._require_open()
        self._frames.send(_FrameKind.NOTIFY, 0, self._wire.pack([method, *args]))

    async def drain(self) -> None:
        """Wait while much is unsent because the peer reads too slowly."""
        self._require_open()
        with suppress(ConnectionError):  # the next line raises ChannelClosed for it
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

    async def _read(self, reader: asyncio.StreamReader, buffer: "_FrameBuffer") -> None:
        reason = "the peer disconnected"
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                for frame in buffer.feed(chunk):
                    self._receive(frame)
        except (OSError, FrameError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._end(reason)

    def _receive(self, frame: "_Frame") -> None:
        if frame.kind in (_FrameKind.CALL, _FrameKind.NOTIFY):
            self._handle(frame)
        elif frame.kind is _FrameKind.CANCEL:
            if (task := self._running.pop(frame.call_id, None)) is not None:
                task.cancel()
        elif (answer := self._waiting.pop(frame.call_id, None)) is not None and not answer.done():
            self._resolve(answer, frame)

    def _resolve(self, answer: asyncio.Future[Any], frame: "_Frame") -> None:
        try:
            content = self._wire.unpack(frame.payload)
        except Exception as error:
            answer.set_exception(error)
            return
        if frame.kind is _FrameKind.RESULT:
            answer.set_result(content)
        else:
            answer.set_exception(_load_error(self.peer, content))

    def _handle(self, frame: "_Frame") -> None:
        try:
            method, *args = self._wire.unpack(frame.payload)
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

    def _start(self, frame: "_Frame", outcome: Awaitable[Any]) -> None:
        task = self._loop.create_task(self._run(frame, outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if frame.kind is _FrameKind.CALL:
            self._running[frame.call_id] = task

    async def _run(self, frame: "_Frame", outcome: Awaitable[Any]) -> None:
        try:
            result = await outcome
        except asyncio.CancelledError as error:
            if frame.call_id in self._running:  # it cancelled itself: the caller still waits
                self._answer_error(frame, error)
            raise
        except Exception as error:
            self._answer_error(frame, error)
        else:
            with suppress(ChannelClosed):  # the caller is gone
                await self.drain()
                self._answer(frame, result)
        finally:
            self._running.pop(frame.call_id, None)

    def _answer(self, frame: "_Frame", result: Any) -> None:
        if frame.kind is _FrameKind.NOTIFY or not self.is_open:
            return
        try:
            self._frames.send(_FrameKind.RESULT, frame.call_id, self._wire.pack(result))
        except Exception as error:
            self._answer_error(frame, error)

    def _answer_error(self, frame: "_Frame", error: BaseException) -> None:
        if frame.kind is _FrameKind.NOTIFY:
            logger.error("a message from %s failed", self.peer, exc_info=error)
        elif self.is_open:
            self._frames.send(_FrameKind.ERROR, frame.call_id, self._wire.pack(_dump_error(error)))

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
        self._frames.close()


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


class _FrameKind(IntEnum):
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


class _Frame(NamedTuple):
    kind: _FrameKind
    call_id: int
    payload: bytes


class _FrameWriter:
    """Gathers the frames of one tick of the event loop and writes them together."""

    def __init__(self, writer: asyncio.StreamWriter, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0

    def send(self, kind: _FrameKind, call_id: int, payload: bytes = b"") -> None:
        if len(payload) > self._max_bytes:
            raise FrameError(
                f"a frame must be at most {self._max_bytes} bytes, got {len(payload)}; send it in parts or by file"
            )
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(HEADER.pack(len(payload), kind, call_id) + payload)
        self._gathered_bytes += HEADER.size + len(payload)
        if self._gathered_bytes > FLUSH_BYTES:  # the transport must see it, or `drain` would let the whole tick through
            self._flush()

    async def drain(self) -> None:
        """Wait while more than `UNSENT_BYTES` are unsent."""
        # All waiters wake together, so each looks again: the first of them may have filled the buffer.
        while self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
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
            self._writer.write(b"".join(self._gathered))
        self._gathered.clear()
        self._gathered_bytes = 0


class _FrameBuffer:
    """Cuts a stream of bytes into frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[_Frame]:
        """The frames that `chunk` completes. Consume them all before feeding the next chunk."""
        pending = self._pending
        pending += chunk
        start = 0
        while len(pending) - start >= HEADER.size:
            size, kind, call_id = HEADER.unpack_from(pending, start)
            self._check(size, kind)
            begin = start + HEADER.size
            if len(pending) < begin + size:
                break
            start = begin + size
            yield _Frame(_FrameKind(kind), call_id, bytes(pending[begin:start]))
        del pending[:start]

    def _check(self, size: int, kind: int) -> None:
        if size > self._max_bytes:
            raise FrameError(f"a frame must be at most {self._max_bytes} bytes, the peer announced {size}")
        if not _FrameKind.CALL <= kind <= _FrameKind.CANCEL:
            raise FrameError(f"a frame's kind must lie in 1..5, the peer sent {kind}; it speaks another protocol")
