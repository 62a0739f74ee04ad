"""Frames between a pool and one worker process: a kind, a length, bytes, over a socket pair.

Both ends use this module, so it stays light: a worker process imports it before anything of the user's. It refuses to
interpret bodies.
"""

import socket
import struct
import time
from enum import IntEnum

DIGEST_BYTES = 16
"""Length of the name that a function goes by on a channel."""
_HEADER = struct.Struct("!BQ")
_CHUNK_BYTES = 1 << 16


class Kind(IntEnum):
    LOAD = 1
    """To the worker: keep this function."""
    CALL = 2
    """To the worker: run a kept function with these arguments."""
    LOADED = 3
    """The function is kept."""
    STARTED = 4
    """The arguments are unpacked and the function begins: its deadline runs from here."""
    RESULT = 5
    """The function returned."""
    FAILED = 6
    """Loading or calling raised."""
    EXHAUSTED = 7
    """Loading or calling ran into the memory limit, so the process is of no further use."""


class ChannelClosed(EOFError):
    """The other end is gone."""


class Channel:
    """One end. A deadline is a `time.monotonic()` value; None waits for as long as the other end lives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    def send(self, kind: Kind, body: bytes = b"", deadline: float | None = None) -> None:
        self._allow(deadline)
        try:
            self._socket.sendall(_HEADER.pack(kind, len(body)) + body)
        except BlockingIOError:
            raise TimeoutError("the frame was not taken in time") from None
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, deadline: float | None = None) -> tuple[Kind, bytes]:
        kind, length = _HEADER.unpack(self._take(_HEADER.size, deadline))
        return Kind(kind), self._take(length, deadline)

    def close(self) -> None:
        self._socket.close()

    def _take(self, count: int, deadline: float | None) -> bytes:
        while len(self._buffer) < count:
            self._buffer += self._read(deadline)
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _read(self, deadline: float | None) -> bytes:
        self._allow(deadline)
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            raise TimeoutError("no frame came in time") from None
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        if not chunk:
            raise ChannelClosed("the other end closed")
        return chunk

    def _allow(self, deadline: float | None) -> None:
        # Past the deadline the socket is still asked once without waiting: an answer that came in time counts even if
        # this thread was not scheduled to see it.
        self._socket.settimeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
