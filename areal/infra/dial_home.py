"""How the processes of a run find each other: each dials the driver and says who it is.

The driver keeps a `Home`; the address and the run's secret reach a process by its environment, never by its arguments,
which anybody on the machine can read. A process whose channel home closes has lost its driver and ends.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal.api.errors import ArealError, ProcessDied
from areal.infra.channel import Channel, Handler
from areal.infra.endpoint import Endpoint, connect, serve
from areal.infra.scheduler import Placement
from areal.infra.wire import Wire

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


class Home:
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
