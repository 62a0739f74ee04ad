"""Fixtures for tests that open sockets and start processes."""

import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from processes import Reports

from areal.infra.rpc.channel import Channel, Handler
from areal.infra.rpc.connect import connect, serve
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, LocalScheduler, Placement
from areal.utils.logging import getLogger

Pair = tuple[Channel, Channel]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What this package logs, tracebacks included."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    getLogger().addHandler(handler)
    yield lines
    getLogger().removeHandler(handler)


@pytest.fixture
def make_pair(stack: AsyncExitStack, tmp_path: Path) -> Callable[..., object]:
    """Two ends of one connection: (caller, listener), the listener with the given handlers."""

    async def make(handlers: dict[str, Handler], **options: object) -> Pair:
        accepted: list[Channel] = []

        def on_channel(channel: Channel) -> None:
            channel.handlers.update(handlers)
            accepted.append(channel)

        listener = await serve(f"unix:{tmp_path}/s", on_channel, wire=api_wire(), **options)
        stack.push_async_callback(listener.close)
        caller = await connect(listener.address, wire=api_wire(), peer="the engine", **options)
        stack.push_async_callback(caller.close)
        return caller, accepted[0]

    return make


@pytest.fixture
async def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reports]:
    reports = Reports(tmp_path / "r")
    monkeypatch.setenv("REPORT", reports.path)
    server = await reports.listen()
    yield reports
    server.close()


@pytest.fixture
async def scheduler() -> AsyncIterator[LocalScheduler]:
    scheduler = LocalScheduler()
    yield scheduler
    await scheduler.close()


@pytest.fixture
def start(scheduler: LocalScheduler, tmp_path: Path) -> Callable[..., object]:
    """Start Python code as a process: `await start("print(1)", name="rollout worker 0")`."""

    async def start(code: str, name: str = "rollout worker 0", secret: bytes = b"", **env: str) -> Placement:
        argv = [sys.executable, "-c", code]
        return await scheduler.start(Command(name, argv, tmp_path / "log.txt", env, secret=secret))

    return start
