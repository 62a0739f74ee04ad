"""Where channels come from: `connect` to an address, or `serve` one.

An address is `unix:PATH` or `tcp:HOST:PORT`; port 0 takes a free one. Every connection begins with a handshake that
proves knowledge of `secret` (empty = anyone who can reach the address), within a deadline.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from areal.config.errors import ArealError
from areal.infra.channel import Channel, ChannelClosed, Handler
from areal.infra.frames import MAX_FRAME_BYTES
from areal.infra.handshake import HandshakeRefused, demand, prove
from areal.infra.wire import Wire
from areal.utils.logging import getLogger

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
