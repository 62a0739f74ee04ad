"""Asks the processes of a run what they do, over connections and in threads of their own.

An event loop that is blocked, or that computes, answers no call; so a thread in each process answers instead. It asks
the event loop, and if that gives no answer, it says which line holds it. A process that is stopped answers nothing at
all: of that, its keeper knows more (`scheduler/keeper.py`).
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from areal.api.messages import Doing
from areal.infra.loop_thread import LoopThread
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.rpc.connect import Listener, connect, serve
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.wire import api_wire
from areal.infra.status import LOOP_SECONDS, Look, WatchedLoop
from areal.utils.closing import Closing

ADDRESS_VARIABLE = "AREAL_STATUS_ADDRESS"
NAME_VARIABLE = "AREAL_PROCESS_NAME"
STATUS_ROLE = "status"
"""What the secret of these connections is made for."""
ASK_SECONDS = 2 * LOOP_SECONDS
"""For the answer of a process; its event loop has half of it."""
GREETING_SECONDS = 60.0


def start_answering(secret: bytes, look: Look, blocked_seconds: Callable[[], float | None] = lambda: None) -> None:
    """In a process of a run: answer, from a thread, what `look` says on the present event loop."""
    address, name = os.environ.get(ADDRESS_VARIABLE), os.environ.get(NAME_VARIABLE, "")
    if address is None:
        return
    watched = WatchedLoop("its event loop", asyncio.get_running_loop(), threading.get_ident(), blocked_seconds)

    async def answer() -> None:
        with suppress(ChannelClosed, TimeoutError):  # nobody asks then, and nothing else depends on it
            channel = await connect(
                address,
                wire=api_wire(),
                peer="who asks for the status",
                handlers={"status": lambda: watched.ask(look)},
                secret=role_secret(secret, STATUS_ROLE),
                timeout_seconds=GREETING_SECONDS,
            )
            await channel.call("here", name, timeout_seconds=GREETING_SECONDS)
            await channel.closed

    threading.Thread(target=lambda: asyncio.run(answer()), name="areal status", daemon=True).start()


class ProcessStatus(Closing):
    """The driver's end: has an event loop of its own, so that it works whatever the driver's does."""

    def __init__(self) -> None:
        self._loop = LoopThread("areal status")
        self._listener: Listener | None = None
        self._channels: dict[str, Channel] = {}
        """By the name of the process, of which the latest counts."""

    async def open(self, host: str, secret: bytes) -> None:
        """Listen; `secret` is the run's. Call it on another event loop."""
        await asyncio.wrap_future(self._loop.begin(self._open(host, secret)))

    def env(self, name: str) -> dict[str, str]:
        """What the process of that name needs in its environment."""
        assert self._listener is not None, "open() comes first"
        return {ADDRESS_VARIABLE: self._listener.address, NAME_VARIABLE: name}

    async def ask(self) -> dict[str, list[Doing] | None]:
        """What every process that is connected says, by its name; None = nothing, in time. Call it on any loop."""
        return await asyncio.wrap_future(self._loop.begin(self._ask_all()))

    def close(self) -> None:
        if self._listener is not None:
            self._loop.run(self._listener.close())
        self._loop.close()

    async def _open(self, host: str, secret: bytes) -> None:
        self._listener = await serve(
            f"tcp:{host}:0",
            lambda channel: channel.handlers.update({"here": lambda name: self._take(name, channel)}),
            wire=api_wire(),
            peer="a process that tells its status",
            secret=role_secret(secret, STATUS_ROLE),
        )

    def _take(self, name: str, channel: Channel) -> None:
        self._channels[name] = channel

    async def _ask_all(self) -> dict[str, list[Doing] | None]:
        channels = {name: channel for name, channel in self._channels.items() if channel.is_open}
        answers = await asyncio.gather(*(_ask(channel) for channel in channels.values()))
        return dict(zip(channels, answers, strict=True))


async def _ask(channel: Channel) -> list[Doing] | None:
    try:
        answer: list[Doing] = await channel.call("status", timeout_seconds=ASK_SECONDS)
    except (ChannelClosed, TimeoutError):
        return None
    return answer
