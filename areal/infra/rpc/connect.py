"""How channels come about: `connect` to an address, `serve` one, and how the processes of a run find the driver.

Before any frame is read, both ends prove within a deadline that they know a secret, which itself never travels; what
follows is sealed with it (frames.py). An empty secret lets in any process that can reach the address.

Every process of a run connects to the driver and says who it is. It finds the address in its environment. The run's
secret comes on its standard input and is read once: unlike arguments and environments, it cannot be read there by the
agents that the process starts. A process whose channel to the driver closes has lost its driver and ends.
"""

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal.api.errors import ArealError, ProcessDied
from areal.infra.heartbeat import start_beating
from areal.infra.rpc.channel import Channel, ChannelClosed, Handler
from areal.infra.rpc.frames import MAX_FRAME_BYTES, HandshakeRefused
from areal.infra.rpc.sockets import (
    HANDSHAKE_SECONDS,
    Door,
    address_towards,
    dial,
    handshake_as_caller,
    listen,
    unix_path,
)
from areal.infra.rpc.wire import Wire
from areal.infra.scheduler.base import Placement
from areal.utils import waits
from areal.utils.net import is_loopback

ADDRESS_VARIABLE = "AREAL_DRIVER_ADDRESS"
STANDARD_INPUT = 0
CLOSE_SECONDS = 5.0


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
    """A channel to the process that serves `address`; `peer` is what messages call it."""
    peer = peer or address
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await dial(address)
            try:
                seals = await handshake_as_caller(reader, writer, secret)
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        raise ChannelClosed(f"{peer} at {address} did not answer within {timeout_seconds} s") from None
    except (OSError, HandshakeRefused) as error:
        raise ChannelClosed(f"cannot connect to {peer} at {address}: {error}") from None
    return Channel(reader, writer, seals, wire, peer, handlers, max_frame_bytes)


async def serve(
    address: str,
    on_channel: Callable[[Channel], None],
    *,
    wire: Wire,
    peer: str = "caller",
    secret: bytes = b"",
    roles: Mapping[str, bytes] | None = None,
    handshake_seconds: float = HANDSHAKE_SECONDS,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> "Listener":
    """Listen; `on_channel` gets each channel after its handshake and before its first frame, and gives it handlers.

    `roles`: further secrets that open the listener; a channel's `role` says which of them its peer knows.
    """
    channels: set[Channel] = set()
    door = Door(address, secret, handshake_seconds, roles)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        admitted = await door.admit(reader, writer)
        if admitted is None:
            return
        role, seals = admitted
        channel = Channel(reader, writer, seals, wire, peer, None, max_frame_bytes)
        channel.role = role
        channels.add(channel)
        channel.closed.add_done_callback(lambda _: channels.discard(channel))
        on_channel(channel)

    server, bound = await listen(address, accept)
    return Listener(server, bound, channels)


class Listener:
    """An address that is served, and the channels it has accepted."""

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
        with suppress(TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), CLOSE_SECONDS)
        if self.address.startswith("unix:"):
            with suppress(FileNotFoundError):
                os.unlink(unix_path(self.address))


@dataclass
class ConnectedProcess:
    """A process that has connected to the driver."""

    channel: Channel
    info: dict[str, Any]
    """What it said about itself."""
    expected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the driver has given its channel handlers."""


class DriverListener:
    """Where the processes of a run connect to the driver.

    A process's `hello` is answered once `expect` has been called for it, so none of its calls meets missing handlers.
    """

    def __init__(self, wire: Wire, handlers: Mapping[str, Handler] | None = None) -> None:
        """`handlers`: what any process of the run may call, also before its `hello`."""
        self._wire = wire
        self._handlers = dict(handlers or {})
        self.secret = secrets.token_hex(32).encode()
        """What a process needs on its standard input to connect."""
        self._listener: Listener | None = None
        self._connecting: dict[tuple[str, int], asyncio.Future[ConnectedProcess]] = {}
        """By role and index, while either side waits for the other."""

    async def open(self, address: str = "tcp:127.0.0.1:0") -> None:
        def on_channel(channel: Channel) -> None:
            channel.handlers.update(self._handlers)
            channel.handlers["hello"] = partial(self._hello, channel)

        self._listener = await serve(
            address, on_channel, wire=self._wire, peer="an unnamed process", secret=self.secret
        )

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to connect."""
        assert self._listener is not None, "open() comes first"
        return {ADDRESS_VARIABLE: self._listener.address}

    async def expect(
        self,
        role: str,
        index: int,
        placement: Placement,
        *,
        timeout_seconds: float,
        handlers: Mapping[str, Handler] | None = None,
    ) -> ConnectedProcess:
        """Wait for that process; `ProcessDied` as soon as it ends instead, or when it has not connected in time."""
        connecting = self._connection_of(role, index)
        ending = asyncio.ensure_future(placement.wait())
        try:
            first: set[asyncio.Future[Any]] = {connecting, ending}
            with waits.current().entered("loads its code and connects to the driver", timeout_seconds):
                await asyncio.wait(first, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            self._connecting.pop((role, index), None)
        if not connecting.done():
            raise ProcessDied(_why_absent(placement, timeout_seconds))
        process = connecting.result()
        process.channel.peer = placement.name
        process.channel.handlers.update(handlers or {})
        process.expected.set()
        return process

    async def close(self) -> None:
        """Close the channel of every process, which ends it."""
        if self._listener is not None:
            await self._listener.close()

    def _connection_of(self, role: str, index: int) -> asyncio.Future[ConnectedProcess]:
        if (role, index) not in self._connecting:
            self._connecting[role, index] = asyncio.get_running_loop().create_future()
        return self._connecting[role, index]

    async def _hello(self, channel: Channel, role: str, index: int, info: dict[str, Any]) -> None:
        connecting = self._connection_of(role, index)
        if connecting.done():
            raise ArealError(f"{role} {index} is already connected; each index belongs to one process")
        process = ConnectedProcess(channel, info)
        connecting.set_result(process)
        try:
            await process.expected.wait()  # ends with the caller's deadline or its channel
        finally:
            if not process.expected.is_set() and self._connecting.get((role, index)) is connecting:
                del self._connecting[role, index]


async def connect_to_driver(
    role: str,
    index: int,
    info: dict[str, Any] | None = None,
    handlers: Mapping[str, Handler] | None = None,
    *,
    wire: Wire,
    secret: bytes | None = None,
    timeout_seconds: float = 60.0,
) -> Channel:
    """The process's end: a channel to the driver, and signs of life. When it closes, the process should end.

    `secret`: what `read_secret` gave, for a process that needs it itself; None = it is read here.
    """
    start_beating()
    secret = read_secret() if secret is None else secret
    if not secret:
        raise ArealError(
            f"{role} {index} must be started by a driver, which sets {ADDRESS_VARIABLE} and sends its secret"
        )
    channel = await connect(driver_address(), wire=wire, peer="the driver", handlers=handlers, secret=secret)
    await channel.call("hello", role, index, info or {}, timeout_seconds=timeout_seconds)
    return channel


def driver_address() -> str:
    """Where a process of a run reaches the driver."""
    return os.environ[ADDRESS_VARIABLE]


def own_address() -> str | None:
    """The address of this host at which others of the run reach it; None = all of them are on one host."""
    host = driver_address().removeprefix("tcp:").rpartition(":")[0]
    return None if is_loopback(host) else address_towards(host)


def read_secret() -> bytes:
    """The run's secret: all of the standard input, which is empty from then on, here and in processes started here.

    Empty for a process that no driver has started: its input is not a secret.
    """
    if ADDRESS_VARIABLE not in os.environ:
        return b""
    with open(STANDARD_INPUT, "rb", closefd=False) as stdin:
        secret = stdin.read()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), STANDARD_INPUT)
    return secret


def _why_absent(placement: Placement, timeout_seconds: float) -> str:
    if placement.returncode is not None:
        return placement.describe_exit()
    return (
        f"{placement.name} (pid {placement.pid}) did not connect to the driver within {timeout_seconds} s; "
        f"its log is {placement.log_path}"
    )
