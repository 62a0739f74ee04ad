"""What connects a pool with one worker process: a socket pair for frames, and a pipe of claims.

Both ends use this module, so it stays light: a worker process imports it before anything of the user's.

Every frame to the pool begins with a token: random bytes that came with what it answers. A frame that a function wrote
into the channel blindly, or one that answers an earlier call, does not have the token that the pool waits for. It
breaks the channel and counts as a crash of its process, never as a result. Functions get their arguments pickled; what
they return, and how they fail, comes back as data (`RESULTS`).
"""

import os
import socket
import struct
import time
from enum import IntEnum
from typing import Final

from areal.utils.wire import Wire

RESULTS: Final = Wire()
"""How results and failures are packed. They come from code that is not ours, so nothing in them is unpickled."""
MOST_RESULT_BYTES = 256 << 20
"""Of one packed result; the pool's process has to hold it."""
TOKEN_BYTES = 8
DIGEST_BYTES = 16
"""Length of the digest that identifies a function on a channel."""
EXHAUSTED_STATUS = 179
"""Exit status of a worker process that hit its memory limit; it may be unable to send a frame that says so."""
MAX_CLAIMS = 1 << 12
"""A pipe holds at least this many bytes, so that `Claims.put` never blocks."""
_HEADER = struct.Struct("!BQ")
_TIMEVAL = struct.Struct("@ll")
_CHUNK_BYTES = 1 << 16


class PoolFrame(IntEnum):
    """A frame is its kind, the length of its body, and the body; to the pool, the body begins with a token."""

    LOAD = 1
    """To the worker: keep this function."""
    CALLS = 2
    """To the worker: call a kept function with each of these arguments, in order, as far as claims can be taken."""
    LOADED = 3
    """The function is kept."""
    STARTED = 4
    """The next call has its arguments and begins: its deadline runs from here."""
    RESULT = 5
    """The call returned: its packed result."""
    FAILED = 6
    """The call raised: the packed kind, text and traceback of the exception."""
    DONE = 7
    """No further one of the calls will begin."""
    UNLOADABLE = 8
    """A function, or the arguments of the next call, cannot be loaded; sent instead of LOADED or STARTED."""
    REFUSED = 9
    """The call returned what is no data: packed like FAILED."""


class PoolChannelClosed(EOFError):
    """The other end is gone."""


class PoolChannelBroken(PoolChannelClosed):
    """The other end sent what it never sends by itself: the function that it runs wrote into the channel."""


class PoolChannel:
    """One end. A deadline is a `time.monotonic()` value; None waits for as long as the other end lives.

    The kernel keeps the deadlines of a blocking socket: every further system call would hand the interpreter to another
    thread, which may keep it for milliseconds.
    """

    def __init__(self, end: socket.socket, most_bytes: int | None = None) -> None:
        """`most_bytes` is how long the body of a frame that is received may be; None = as long as it is."""
        end.setblocking(True)
        self._socket = end
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether every byte that was read belonged to a frame that was received."""
        return not self._buffer

    def fileno(self) -> int:
        return self._socket.fileno()

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
        """The next frame. After a TimeoutError, the part that has arrived is kept for another try."""
        self._fill(_HEADER.size, deadline)
        number, length = _HEADER.unpack_from(self._buffer)
        try:
            kind = PoolFrame(number)
        except ValueError:
            raise PoolChannelBroken(f"a frame of the unknown kind {number}") from None
        if self._most_bytes is not None and length > self._most_bytes:
            raise PoolChannelBroken(f"a frame of {length} bytes, of which {self._most_bytes} are allowed")
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


class Claims:
    """Which of the calls that were sent may still begin: a pipe with one byte for each, which both processes can read.

    The kernel gives a byte to exactly one reader. A worker takes one before it begins a call. Its parent takes what is
    left, and from then on knows which calls began, even in a worker that hangs or is dead.
    """

    def __init__(self, read_fd: int, write_fd: int | None = None) -> None:
        """A worker has no `write_fd`."""
        self.read_fd = read_fd
        self._write_fd = write_fd

    @classmethod
    def new(cls) -> "Claims":
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        return cls(read_fd, write_fd)

    def put(self, count: int) -> None:
        assert self._write_fd is not None
        assert count <= MAX_CLAIMS
        os.write(self._write_fd, bytes(count))

    def take(self, at_most: int) -> int:
        """How many were there to take."""
        try:
            return len(os.read(self.read_fd, at_most))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.read_fd)
        if self._write_fd is not None:
            os.close(self._write_fd)
