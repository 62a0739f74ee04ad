"""Bytes on a connection that nobody can alter: a handshake between two ends that know one secret, then sealed frames.

The handshake: the listener sends a nonce; the caller its own nonce and a MAC over both; the listener a MAC over both
with another label. The secret itself never travels. Secret and nonces give each direction of each connection a key of
its own. A frame is its length, its content and a MAC over the number of frames before it, the length and the content.
So a frame that was altered, repeated, left out, moved, reflected or taken from another connection is refused with
`FrameError`, after which the connection must be closed. Frames are not encrypted.

There is no input or output here (`sockets.py` does it), and only the standard library: keepers use it too.
"""

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
MAC_BYTES = 16
LENGTH = struct.Struct(">I")
COUNT = struct.Struct(">Q")
SHORT_BYTES = 2048
"""Up to here BLAKE2b takes less time than HMAC-SHA256, for which processors have instructions; 1.4 against 4.4 us."""
MAX_FRAME_BYTES = 256 << 20
SILENT_SECONDS = 2
"""After so long without a byte the kernel asks the other end whether it is there, and again every second."""
LOST_SECONDS = 6
"""A peer that has acknowledged nothing for so long is gone."""


class FrameError(ValueError):
    """A frame that is too large or was not sealed by the peer, or bytes that are not a frame."""


class HandshakeRefused(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


class Sealer:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._mac = _Mac(key)

    def seal(self, content: bytes) -> bytes:
        frame = LENGTH.pack(len(content)) + content
        return frame + self._mac.of_next(frame)


class Opener:
    """Cuts the bytes of the other direction into frames and checks each. After a FrameError it must not be used."""

    def __init__(self, key: bytes, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._mac = _Mac(key)
        self._begun = bytearray()
        """Of a frame that has not ended."""
        self._wanted = 0
        """How many bytes it needs before there is something to do."""

    @property
    def is_between_frames(self) -> bool:
        """False = a frame has begun and not ended."""
        return not self._begun

    def feed(self, chunk: bytes) -> list[bytes]:
        """The contents of the frames that `chunk` completes."""
        if self._begun:
            self._begun += chunk
            if len(self._begun) < self._wanted:
                return []
            chunk = bytes(self._begun)
            self._begun.clear()
        contents: list[bytes] = []
        start = 0
        self._wanted = LENGTH.size
        while len(chunk) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(chunk, start)
            if size > self.max_bytes:
                raise FrameError(f"a frame must be at most {self.max_bytes} bytes, the peer announced {size}")
            end = start + LENGTH.size + size
            if len(chunk) < end + MAC_BYTES:
                self._wanted = end + MAC_BYTES - start
                break
            frame = chunk[start:end]
            start = end + MAC_BYTES
            if not hmac.compare_digest(self._mac.of_next(frame), chunk[end:start]):
                raise FrameError("a frame was not sealed by the peer for its place: it was altered, moved or repeated")
            contents.append(frame[LENGTH.size :])
        self._begun += chunk[start:]
        return contents


class _Mac:
    """The MAC of one frame after another. Each length is checked by what is fastest for it."""

    def __init__(self, key: bytes) -> None:
        self._short = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._long = hmac.new(key, digestmod="sha256")
        self._count = 0

    def of_next(self, frame: bytes) -> bytes:
        state = self._short.copy() if len(frame) <= SHORT_BYTES else self._long.copy()
        state.update(COUNT.pack(self._count))
        state.update(frame)
        self._count += 1
        return state.digest()[:MAC_BYTES]


Seals = tuple[Sealer, Opener]
"""For what this end sends, and for what it receives."""


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def caller_proof(secret: bytes, nonces: bytes) -> bytes:
    """That the caller knows the secret. `nonces` are the listener's and then the caller's, here and below."""
    return _derive(secret, b"caller", nonces)


def listener_proof(secret: bytes, nonces: bytes) -> bytes:
    return _derive(secret, b"listener", nonces)


def verify(received: bytes, *expected: bytes) -> int:
    """Which of the expected it is."""
    for index, each in enumerate(expected):
        if hmac.compare_digest(received, each):
            return index
    raise HandshakeRefused("it does not know the secret")


def role_secret(secret: bytes, role: str) -> bytes:
    """A secret that proves a role: whoever knows `secret` can make it, and it tells nobody `secret`."""
    return _derive(secret, b"role", role.encode())


def caller_seals(secret: bytes, nonces: bytes) -> Seals:
    """What the caller has after the handshake."""
    return Sealer(_derive(secret, b"from the caller", nonces)), Opener(_derive(secret, b"from the listener", nonces))


def listener_seals(secret: bytes, nonces: bytes) -> Seals:
    return Sealer(_derive(secret, b"from the listener", nonces)), Opener(_derive(secret, b"from the caller", nonces))


def call(secret: bytes, receive: Callable[[int], bytes], send: Callable[[bytes], object]) -> Seals:
    """The caller's whole handshake, for a blocking connection; `receive` gives exactly as many bytes as asked."""
    theirs, ours = receive(NONCE_BYTES), new_nonce()
    nonces = theirs + ours
    send(ours + caller_proof(secret, nonces))
    verify(receive(PROOF_BYTES), listener_proof(secret, nonces))
    return caller_seals(secret, nonces)


def notice_loss(connection: socket.socket) -> None:
    """Make the kernel end a TCP connection whose other end is gone without a word: a pulled cable, a lost host.

    A peer on this machine cannot be. There it would only do harm: the kernel also ends a connection whose other end
    reads nothing for so long, a driver in a debugger for example.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.getpeername()[0] in (connection.getsockname()[0], "127.0.0.1", "::1"):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": SILENT_SECONDS,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": LOST_SECONDS - SILENT_SECONDS,
        "TCP_USER_TIMEOUT": LOST_SECONDS * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _derive(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, label + nonces, "sha256")
