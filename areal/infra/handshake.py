"""Proof, before any frame is read, that both ends of a connection know the run's secret, which itself never travels.

listener → nonce; caller → its own nonce and a MAC over both; listener → a MAC over both with another label.
"""

import asyncio
import hashlib
import hmac
import secrets

NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size


class HandshakeRefused(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The caller's side."""
    theirs = await _read(reader, NONCE_BYTES)
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(ours + _mac(secret, b"caller", theirs + ours))
    _verify(await _read(reader, MAC_BYTES), _mac(secret, b"listener", theirs + ours))


async def demand(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The listener's side."""
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(ours)
    theirs = await _read(reader, NONCE_BYTES)
    _verify(await _read(reader, MAC_BYTES), _mac(secret, b"caller", ours + theirs))
    writer.write(_mac(secret, b"listener", ours + theirs))


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise HandshakeRefused("it hung up before both had proved that they know the secret") from None


def _mac(secret: bytes, label: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, label + message, "sha256")


def _verify(received: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(received, expected):
        raise HandshakeRefused("it does not know the secret")
