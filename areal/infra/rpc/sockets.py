"""Connections between the processes of a run: addresses, dialling, listening, and the handshake on a new connection.

An address is `unix:PATH` or `tcp:HOST:PORT`; port 0 takes a free one. Both ends of a TCP connection notice within
seconds that the other host is gone.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from areal.api.errors import ArealError
from areal.infra.rpc.frames import (
    NONCE_BYTES,
    PROOF_BYTES,
    HandshakeRefused,
    Seals,
    caller_proof,
    caller_seals,
    listener_proof,
    listener_seals,
    new_nonce,
    notice_loss,
    verify,
)
from areal.utils.logging import getLogger

READ_LIMIT_BYTES = 1 << 20
UNIX_PATH_BYTES = 107
BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""Connections that one turn of the event loop accepts; each has a descriptor before anybody can look at it."""
MOST_STRANGERS = 128
"""Connections to one listener that have not proved yet that they know the secret."""
HANDSHAKE_SECONDS = 10.0
QUIET_SECONDS = 10.0
"""Refusals are logged at most so often: whoever reaches a listener can cause as many as they like."""
DISCARD_PORT = 9
"""Any port will do: nothing is sent there."""
logger = getLogger("connect")


class HungUp(HandshakeRefused):
    """The other end went instead of saying its next word."""


class Door:
    """Lets in connections that prove to know the secret.

    Whoever can reach the address can also connect and say nothing. So strangers are few at any time: the one that has
    waited longest makes room for the next. Those who know the secret are strangers for some milliseconds only.
    """

    def __init__(
        self, name: str, secret: bytes, seconds: float = HANDSHAKE_SECONDS, roles: Mapping[str, bytes] | None = None
    ) -> None:
        """`name` is what the log calls the listener; `roles` are further secrets, by what knowing one makes a peer."""
        self._name = name
        self._secrets = {"": secret, **(roles or {})}
        self._seconds = seconds
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """The first has waited longest."""
        self._refused = 0
        """Since the last line in the log."""
        self._log_at = -float("inf")

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, Seals] | None:
        """Its role, which is empty for who knows the listener's own secret; None = it was refused, and is closed."""
        if len(self._strangers) >= MOST_STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(self._seconds):
                index, seals = await handshake_as_listener(reader, writer, *self._secrets.values())
                return list(self._secrets)[index], seals
        except (HandshakeRefused, OSError) as error:  # TimeoutError is an OSError
            left = isinstance(error, HungUp) and writer in self._strangers  # by itself: it had waited long enough
            if not left:
                self._log(str(error) or "the handshake timed out")
            writer.close()
            return None
        finally:
            self._strangers.pop(writer, None)

    def _log(self, why: str) -> None:
        self._refused += 1
        now = time.monotonic()
        if now >= self._log_at:
            before = f"; so were {self._refused - 1} before it" if self._refused > 1 else ""
            logger.warning("refused a connection to %s: %s%s", self._name, why, before)
            self._refused, self._log_at = 0, now + QUIET_SECONDS


async def handshake_as_listener(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *secrets: bytes
) -> tuple[int, Seals]:
    """Which of the secrets the caller knows."""
    ours = new_nonce()
    writer.write(ours)
    nonces = ours + await _read(reader, NONCE_BYTES)
    index = verify(await _read(reader, PROOF_BYTES), *(caller_proof(secret, nonces) for secret in secrets))
    writer.write(listener_proof(secrets[index], nonces))
    return index, listener_seals(secrets[index], nonces)


async def handshake_as_caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Seals:
    theirs, ours = await _read(reader, NONCE_BYTES), new_nonce()
    nonces = theirs + ours
    writer.write(ours + caller_proof(secret, nonces))
    verify(await _read(reader, PROOF_BYTES), listener_proof(secret, nonces))
    return caller_seals(secret, nonces)


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(unix_path(address), limit=READ_LIMIT_BYTES)
    host, port = host_and_port(address)
    reader, writer = await asyncio.open_connection(host, port, limit=READ_LIMIT_BYTES)
    notice_loss(writer.get_extra_info("socket"))
    return reader, writer


async def listen(
    address: str, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
) -> tuple[asyncio.Server, str]:
    """The server, and its address with the real port."""
    if address.startswith("unix:"):
        path = unix_path(address)
        unix = await asyncio.start_unix_server(accept, path, limit=READ_LIMIT_BYTES, backlog=BACKLOG)
        os.chmod(path, 0o600)
        return unix, address

    async def accept_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        notice_loss(writer.get_extra_info("socket"))
        await accept(reader, writer)

    host, port = host_and_port(address)
    tcp = await asyncio.start_server(accept_tcp, host, port, limit=READ_LIMIT_BYTES, backlog=ACCEPTED_AT_ONCE)
    for each in tcp.sockets:
        with socket.fromfd(each.fileno(), each.family, each.type) as same:
            same.listen(BACKLOG)  # how many the kernel keeps waiting; to the event loop one number is both
    return tcp, f"tcp:{host}:{tcp.sockets[0].getsockname()[1]}"


def unix_path(address: str) -> str:
    path = address.removeprefix("unix:")
    if not 0 < len(os.fsencode(path)) <= UNIX_PATH_BYTES:
        raise ArealError(
            f"a Unix socket's path must have 1 to {UNIX_PATH_BYTES} bytes, got {len(os.fsencode(path))}: {path!r}; "
            "put it in a directory with a shorter name"
        )
    return path


def host_and_port(address: str) -> tuple[str, int]:
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    with suppress(ValueError):
        if kind == "tcp" and host:
            return host, int(port)
    raise ArealError(f"an address must be unix:PATH or tcp:HOST:PORT, got {address!r}")


def address_towards(host: str) -> str:
    """This machine's address on the network through which it reaches `host`, for listeners that `host` is to reach."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, DISCARD_PORT))  # chooses a route; a datagram socket sends nothing for it
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise ArealError(
            f"this machine must have a route to {host!r}, got: {error}; set scheduler.address to its own address"
        ) from None
    return address


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        kind = HandshakeRefused if getattr(error, "partial", b"") else HungUp
        raise kind("it disconnected during the handshake; the secrets may differ") from None
