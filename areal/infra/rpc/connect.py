"""Proof, before any frame is read, that both ends of a connection know the run's secret, which itself never travels.

listener → nonce; caller → its own nonce and a MAC over both; listener → a MAC over both with another label.
"""

# MERGED-DOC
# Where channels come from: `connect` to an address, or `serve` one.
#
# An address is `unix:PATH` or `tcp:HOST:PORT`; port 0 takes a free one. Every connection begins with a handshake that
# proves knowledge of `secret` (empty = anyone who can reach the address), within a deadline.
# How the processes of a run find each other: each dials the driver and says who it is.
#
# The driver keeps a `Home`; the address and the run's secret reach a process by its environment, never by its arguments,
# which anybody on the machine can read. A process whose channel home closes has lost its driver and ends.

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal.api.errors import ArealError, ProcessDied
from areal.infra.rpc.channel import MAX_FRAME_BYTES, Channel, ChannelClosed, Handler
from areal.infra.rpc.wire import Wire
from areal.infra.scheduler import Placement
from areal.utils.logging import getLogger

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


READ_LIMIT_BYTES = 1 << 20
UNIX_PATH_BYTES = 107
BACKLOG = 1024
logger = getLogger("endpoint")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(
    address: str,
    *,
    wire: Wire,
    peer: str = "",
    handlers: Mapping[str, Handler] | None = None,
    secret: bytes = b"",
    timeout_seconds: float = 10.0,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> Channel:
    """A channel to whoever serves `address`; `peer` is what messages call it."""
    peer = peer or address
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await _dial(address)
            try:
                await prove(reader, writer, secret)
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        raise ChannelClosed(f"{peer} at {address} did not answer within {timeout_seconds} s") from None
    except (OSError, HandshakeRefused) as error:
        raise ChannelClosed(f"cannot connect to {peer} at {address}: {error}") from None
    return Channel(reader, writer, wire, peer, handlers, max_frame_bytes)


class Endpoint:
    """A listening address and the channels it has accepted."""

    def __init__(self, server: asyncio.Server, address: str, channels: set[Channel]) -> None:
        self.address = address
        """With the real port."""
        self.channels = channels
        """Those that are open."""
        self._server = server

    async def close(self) -> None:
        """Stop listening and close every channel."""
        self._server.close()
        await asyncio.gather(*(channel.close() for channel in list(self.channels)))
        await self._server.wait_closed()
        if self.address.startswith("unix:"):
            with suppress(FileNotFoundError):
                os.unlink(_unix_path(self.address))


async def serve(
    address: str,
    on_channel: Callable[[Channel], None],
    *,
    wire: Wire,
    peer: str = "caller",
    secret: bytes = b"",
    handshake_seconds: float = 10.0,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> Endpoint:
    """Listen; `on_channel` receives each proven channel before its first frame is read, and gives it handlers."""
    channels: set[Channel] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(handshake_seconds):
                await demand(reader, writer, secret)
        except (HandshakeRefused, OSError) as error:  # TimeoutError is an OSError
            logger.warning("refused a connection to %s: %s", address, error or "it was silent")
            writer.close()
            return
        channel = Channel(reader, writer, wire, peer, None, max_frame_bytes)
        channels.add(channel)
        channel.closed.add_done_callback(lambda _: channels.discard(channel))
        on_channel(channel)

    server, bound = await _listen(address, accept)
    return Endpoint(server, bound, channels)


async def _dial(address: str) -> Streams:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(_unix_path(address), limit=READ_LIMIT_BYTES)
    host, port = _host_and_port(address)
    return await asyncio.open_connection(host, port, limit=READ_LIMIT_BYTES)


async def _listen(address: str, accept: Callable[..., Any]) -> tuple[asyncio.Server, str]:
    if address.startswith("unix:"):
        path = _unix_path(address)
        unix = await asyncio.start_unix_server(accept, path, limit=READ_LIMIT_BYTES, backlog=BACKLOG)
        os.chmod(path, 0o600)
        return unix, address
    host, port = _host_and_port(address)
    tcp = await asyncio.start_server(accept, host, port, limit=READ_LIMIT_BYTES, backlog=BACKLOG)
    return tcp, f"tcp:{host}:{tcp.sockets[0].getsockname()[1]}"


def _unix_path(address: str) -> str:
    path = address.removeprefix("unix:")
    if not 0 < len(os.fsencode(path)) <= UNIX_PATH_BYTES:
        raise ArealError(
            f"a Unix socket's path must have 1 to {UNIX_PATH_BYTES} bytes, got {len(os.fsencode(path))}: {path!r}; "
            "put it in a directory with a shorter name"
        )
    return path


def _host_and_port(address: str) -> tuple[str, int]:
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    with suppress(ValueError):
        if kind == "tcp" and host:
            return host, int(port)
    raise ArealError(f"an address must be unix:PATH or tcp:HOST:PORT, got {address!r}")


ADDRESS_VARIABLE = "AREAL_HOME_ADDRESS"
SECRET_VARIABLE = "AREAL_HOME_SECRET"

Seat = tuple[str, int]
"""A role and an index in it."""


@dataclass
class Arrival:
    """A process that has dialled home."""

    channel: Channel
    info: dict[str, Any]
    """What it said about itself."""
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)


class DriverListener:
    """The driver's end. A hello is answered once it is expected, so no call of a process meets missing handlers."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._secret = secrets.token_hex(32)
        self._endpoint: Endpoint | None = None
        self._arrivals: dict[Seat, asyncio.Future[Arrival]] = {}

    async def open(self, address: str = "tcp:127.0.0.1:0") -> None:
        self._endpoint = await serve(
            address, self._admit, wire=self._wire, peer="a process that has not said its name", secret=self._key
        )

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to dial home."""
        assert self._endpoint is not None, "open() comes first"
        return {ADDRESS_VARIABLE: self._endpoint.address, SECRET_VARIABLE: self._secret}

    async def expect(
        self,
        role: str,
        index: int,
        placement: Placement,
        *,
        timeout_seconds: float,
        handlers: Mapping[str, Handler] | None = None,
    ) -> Arrival:
        """Wait for that process; `ProcessDied` as soon as it ends instead, or when it is not there in time."""
        arriving = self._seat((role, index))
        ending = asyncio.ensure_future(placement.wait())
        try:
            first: set[asyncio.Future[Any]] = {arriving, ending}
            await asyncio.wait(first, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            self._arrivals.pop((role, index), None)
        if not arriving.done():
            raise ProcessDied(_why_absent(placement, timeout_seconds))
        arrival = arriving.result()
        arrival.channel.peer = placement.name
        arrival.channel.handlers.update(handlers or {})
        arrival.welcomed.set()
        return arrival

    async def close(self) -> None:
        """Hang up on every process, which ends it."""
        if self._endpoint is not None:
            await self._endpoint.close()

    @property
    def _key(self) -> bytes:
        return self._secret.encode()

    def _seat(self, seat: Seat) -> asyncio.Future[Arrival]:
        if seat not in self._arrivals:
            self._arrivals[seat] = asyncio.get_running_loop().create_future()
        return self._arrivals[seat]

    def _admit(self, channel: Channel) -> None:
        channel.handlers["hello"] = partial(self._hello, channel)

    async def _hello(self, channel: Channel, role: str, index: int, info: dict[str, Any]) -> None:
        seat = self._seat((role, index))
        if seat.done():
            raise ArealError(f"{role} {index} has already dialled home; each index belongs to one process")
        arrival = Arrival(channel, info)
        seat.set_result(arrival)
        try:
            await arrival.welcomed.wait()  # ends with the caller's deadline or its channel
        finally:
            if not arrival.welcomed.is_set() and self._arrivals.get((role, index)) is seat:
                del self._arrivals[(role, index)]


async def dial_home(
    role: str,
    index: int,
    info: dict[str, Any] | None = None,
    handlers: Mapping[str, Handler] | None = None,
    *,
    wire: Wire,
    timeout_seconds: float = 60.0,
) -> Channel:
    """The process's end: a channel to the driver. When it closes, the process should end."""
    address = os.environ.get(ADDRESS_VARIABLE)
    # Taken out, because user code and the processes it starts have no business with it.
    secret = os.environ.pop(SECRET_VARIABLE, None)
    if address is None or secret is None:
        raise ArealError(
            f"{role} {index} must be started by a driver, which sets {ADDRESS_VARIABLE} and {SECRET_VARIABLE}"
        )
    channel = await connect(address, wire=wire, peer="the driver", handlers=handlers, secret=secret.encode())
    await channel.call("hello", role, index, info or {}, timeout_seconds=timeout_seconds)
    return channel


def _why_absent(placement: Placement, timeout_seconds: float) -> str:
    if placement.returncode is not None:
        return placement.describe_exit()
    return (
        f"{placement.name} (pid {placement.pid}) did not dial home within {timeout_seconds} s; "
        f"its log is {placement.log_path}"
    )
