"""Frames: a fixed header (payload length, kind, call id) and a payload. Knows nothing of what a payload means.

Frames sent in one tick of the event loop leave in one write.
"""

import asyncio
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct(">IBQ")
MAX_FRAME_BYTES = 256 << 20
FLUSH_BYTES = 1 << 18
UNSENT_BYTES = 1 << 20


class FrameKind(IntEnum):
    CALL = 1
    """[method, arguments]; an answer is wanted."""
    NOTIFY = 2
    """[method, arguments]; no answer is wanted."""
    RESULT = 3
    """What a call returned."""
    ERROR = 4
    """What a call raised: [class name, text, traceback]."""
    CANCEL = 5
    """Empty: the caller no longer waits."""


class Frame(NamedTuple):
    kind: FrameKind
    call_id: int
    payload: bytes


class FrameError(ValueError):
    """A frame that is too large, or bytes that are no frame."""


class FrameWriter:
    """Gathers the frames of one tick and writes them together."""

    def __init__(self, writer: asyncio.StreamWriter, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0

    def send(self, kind: FrameKind, call_id: int, payload: bytes = b"") -> None:
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
        # All waiters wake together, so each looks again: the first of them may have filled it anew.
        while self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            await self._writer.drain()

    def close(self) -> None:
        """Let the transport end after what is gathered; `wait_closed` waits for that."""
        self._flush()
        self._writer.close()

    async def wait_closed(self, timeout_seconds: float) -> None:
        """Wait for that; a peer that does not read in time loses the rest."""
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_seconds)
        except TimeoutError:
            self._writer.transport.abort()
        except ConnectionError:
            return  # closed all the same

    def _flush(self) -> None:
        if self._gathered and not self._writer.is_closing():
            self._writer.write(b"".join(self._gathered))
        self._gathered.clear()
        self._gathered_bytes = 0


class FrameBuffer:
    """Cuts a stream of bytes into frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Frames that are complete now that `chunk` came. Consume it before feeding the next one."""
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
            yield Frame(FrameKind(kind), call_id, bytes(pending[begin:start]))
        del pending[:start]

    def _check(self, size: int, kind: int) -> None:
        if size > self._max_bytes:
            raise FrameError(f"a frame must be at most {self._max_bytes} bytes, the peer announced {size}")
        if not FrameKind.CALL <= kind <= FrameKind.CANCEL:
            raise FrameError(f"a frame's kind must lie in 1..5, the peer sent {kind}; it speaks another protocol")
