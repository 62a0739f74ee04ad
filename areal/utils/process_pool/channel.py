"""Frames between a pool and one worker process: a kind, a length, bytes, over a socket pair.

Both ends use this module, so it stays light: a worker process imports it before anything of the user's. It refuses to
interpret bodies.
"""

# MERGED-DOC
# Which calls of a batch may still begin: a pipe with one byte for each, that both sides can read.
#
# The kernel gives a byte to exactly one reader. A worker takes one before it begins a call; its parent takes what is left
# and from then on knows what was begun, also in a worker that hangs or is dead.

import os
import socket
import struct
import time
from enum import IntEnum

DIGEST_BYTES = 16
"""Length of the name that a function goes by on a channel."""
EXHAUSTED_STATUS = 179
"""Exit status of a worker process that ran into its memory limit; it may be unable to say so in a frame."""
_HEADER = struct.Struct("!BQ")
_TIMEVAL = struct.Struct("@ll")
_CHUNK_BYTES = 1 << 16


class PoolFrame(IntEnum):
    LOAD = 1
    """To the worker: keep this function."""
    BATCH = 2
    """To the worker: run a kept function with these arguments, once for each, in order."""
    LOADED = 3
    """The function is kept."""
    STARTED = 4
    """All arguments are unpacked and the first call begins: its deadline runs from here."""
    RESULT = 5
    """A call returned, and the next one begins."""
    FAILED = 6
    """A call raised, and the next one begins."""
    UNLOADABLE = 7
    """A function, or the arguments of one call, cannot be loaded; otherwise like LOADED or RESULT."""


class PoolChannelClosed(EOFError):
    """The other end is gone."""


class PoolChannel:
    """One end. A deadline is a `time.monotonic()` value; None waits for as long as the other end lives.

    The kernel keeps the deadlines of a blocking socket: every further system call would hand the interpreter to another
    thread, which may keep it for milliseconds.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        self._buffer = bytearray()

    def send(self, kind: PoolFrame, body: bytes = b"", deadline: float | None = None) -> None:
        left = memoryview(_HEADER.pack(kind, len(body)) + body)
        while left:
            flags = self._allow(socket.SO_SNDTIMEO, deadline)
            try:
                left = left[self._socket.send(left, flags) :]
            except BlockingIOError:
                raise TimeoutError("the frame was not taken in time") from None
            except ConnectionError as error:
                raise PoolChannelClosed(str(error)) from error

    def receive(self, deadline: float | None = None) -> tuple[PoolFrame, bytes]:
        """The next frame. After a TimeoutError, the part that came is kept for another try."""
        self._fill(_HEADER.size, deadline)
        number, length = _HEADER.unpack_from(self._buffer)
        try:
            kind = PoolFrame(number)
        except ValueError:
            raise PoolChannelClosed("something else was written into the channel") from None
        end = _HEADER.size + length
        self._fill(end, deadline)
        body = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return kind, body

    def close(self) -> None:
        self._socket.close()

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._buffer) < count:
            self._buffer += self._read(deadline)

    def _read(self, deadline: float | None) -> bytes:
        flags = self._allow(socket.SO_RCVTIMEO, deadline)
        try:
            chunk = self._socket.recv(_CHUNK_BYTES, flags)
        except BlockingIOError:
            raise TimeoutError("no frame came in time") from None
        except ConnectionError as error:
            raise PoolChannelClosed(str(error)) from error
        if not chunk:
            raise PoolChannelClosed("the other end closed")
        return chunk

    def _allow(self, option: int, deadline: float | None) -> int:
        """Let the next system call wait until `deadline`; returns the flags to call with."""
        if deadline is None:
            return 0
        left_us = int((deadline - time.monotonic()) * 1e6)
        # Past the deadline the socket is still asked once without waiting: an answer that came in time counts even if
        # this thread was not scheduled to see it.
        if left_us <= 0:
            return socket.MSG_DONTWAIT
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
        return 0


class Tickets:
    def __init__(self, read_fd: int, write_fd: int | None = None) -> None:
        """A worker has no `write_fd`."""
        self.read_fd = read_fd
        self._write_fd = write_fd

    @classmethod
    def new(cls) -> "Tickets":
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        return cls(read_fd, write_fd)

    def put(self, count: int) -> None:
        assert self._write_fd is not None
        if count:
            os.write(self._write_fd, bytes(count))

    def take(self, at_most: int) -> int:
        """How many it got."""
        try:
            return len(os.read(self.read_fd, at_most))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.read_fd)
        if self._write_fd is not None:
            os.close(self._write_fd)
