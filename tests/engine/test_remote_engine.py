"""An engine over a channel: how long new weights may take."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal.api.engine_api import WeightUpdate
from areal.engine.inference.remote import PROGRESS, RemoteEngine
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.wire import api_wire

UPDATE = WeightUpdate(3, "three", "")
SILENT_SECONDS = 2.0


@asynccontextmanager
async def remote(directory: Path, verb: str, take: Callable[[Channel], Any]) -> AsyncIterator[RemoteEngine]:
    """An engine that is asked for `verb` and does `take`."""

    async def taken(update: WeightUpdate) -> None:
        await take(channels[0])

    def welcome(channel: Channel) -> None:
        channels.append(channel)
        channel.handlers[verb] = taken

    channels: list[Channel] = []
    listener = await serve(f"unix:{directory}/socket", welcome, wire=api_wire())
    engine = RemoteEngine(await connect(listener.address, wire=api_wire(), peer="engine 0"))
    try:
        yield engine
    finally:
        await engine.aclose()
        await listener.close()


@pytest.mark.parametrize("verb", ["stage_weights", "update_weights"])
async def test_weights_may_take_as_long_as_pieces_arrive(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.engine.inference.remote.SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr("areal.engine.inference.remote.CONTROL_SECONDS", SILENT_SECONDS)

    async def take(channel: Channel) -> None:
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began + 1.5 * SILENT_SECONDS:
            channel.notify(PROGRESS)
            await channel.drain()
            await asyncio.sleep(SILENT_SECONDS / 20)  # what a piece takes on its way

    async with remote(tmp_path, verb, take) as engine:
        await getattr(engine, verb)(UPDATE)


@pytest.mark.parametrize("verb", ["stage_weights", "update_weights"])
async def test_an_engine_that_reports_no_progress_is_given_up(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.engine.inference.remote.SILENT_SECONDS", 0.1)
    monkeypatch.setattr("areal.engine.inference.remote.CONTROL_SECONDS", 0.1)
    given_up = asyncio.Event()

    async def take(channel: Channel) -> None:
        channel.notify(PROGRESS)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            given_up.set()

    async with remote(tmp_path, verb, take) as engine:
        with pytest.raises(TimeoutError, match=rf"engine 0 did not answer '{verb}' of version 3, and reported no prog"):
            await getattr(engine, verb)(UPDATE)
        await asyncio.wait_for(given_up.wait(), 30)
