import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from areal.api.errors import ArealError, ProcessDied
from areal.infra.rpc.channel import ChannelClosed
from areal.infra.rpc.connect import ADDRESS_VARIABLE, SECRET_VARIABLE, DriverListener, connect, dial_home
from areal.infra.rpc.wire import api_wire

CHILD = """
import asyncio, os
from areal.infra.rpc.wire import api_wire
from areal.infra.rpc.connect import SECRET_VARIABLE, dial_home

async def main():
    handlers = {"add": lambda a, b: a + b, "secret": lambda: os.environ.get(SECRET_VARIABLE)}
    home = await dial_home("worker", 0, {"pid": os.getpid()}, handlers, wire=api_wire())
    home.notify("started", "at once")
    await home.closed

asyncio.run(main())
"""


@pytest.fixture
async def home() -> AsyncIterator[DriverListener]:
    home = DriverListener(api_wire())
    await home.open()
    yield home
    await home.close()


async def test_process_dials_home_says_who_it_is_and_can_be_called(home: DriverListener, start: Any) -> None:
    placement = await start(CHILD, **home.env)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    arrival = await home.expect("worker", 0, placement, timeout_seconds=30, handlers={"started": started.set_result})
    assert arrival.info == {"pid": placement.pid}
    assert await arrival.channel.call("add", 1, 2, timeout_seconds=10) == 3
    assert await asyncio.wait_for(started, 10) == "at once"
    assert await arrival.channel.call("secret", timeout_seconds=10) is None


async def test_process_ends_when_the_driver_hangs_up(home: DriverListener, start: Any) -> None:
    placement = await start(CHILD, **home.env)
    arrival = await home.expect("worker", 0, placement, timeout_seconds=30)
    assert await arrival.channel.call("add", 1, 2, timeout_seconds=10) == 3
    await arrival.channel.close()
    assert await asyncio.wait_for(placement.wait(), 10) == 0


async def test_process_that_ends_before_it_dials_is_reported_at_once(home: DriverListener, start: Any) -> None:
    placement = await start("raise SystemExit('no such model')", **home.env)
    with pytest.raises(ProcessDied, match=r"rollout worker 0 \(pid \d+\) exited with code 1: no such model"):
        await home.expect("worker", 0, placement, timeout_seconds=600)


async def test_process_that_never_dials_is_given_up_with_its_log(home: DriverListener, start: Any) -> None:
    placement = await start("import signal; signal.pause()", **home.env)
    with pytest.raises(ProcessDied, match=r"did not dial home within 0.05 s; its log is \S+log.txt"):
        await home.expect("worker", 0, placement, timeout_seconds=0.05)


async def test_killed_process_fails_its_calls_by_name(home: DriverListener, start: Any) -> None:
    placement = await start(CHILD, **home.env)
    arrival = await home.expect("worker", 0, placement, timeout_seconds=30)
    os.kill(placement.pid, signal.SIGSTOP)  # so that the call is certainly in flight
    call = asyncio.ensure_future(arrival.channel.call("add", 1, 2, timeout_seconds=60))
    await asyncio.sleep(0)
    os.kill(placement.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed, match="rollout worker 0"):
        await call


async def test_second_process_of_one_index_is_refused(home: DriverListener, stack: Any) -> None:
    async def dial() -> None:
        channel = await connect(home.env[ADDRESS_VARIABLE], wire=api_wire(), secret=home.env[SECRET_VARIABLE].encode())
        stack.push_async_callback(channel.close)
        await channel.call("hello", "worker", 0, {}, timeout_seconds=10)

    dials = {asyncio.ensure_future(dial()), asyncio.ensure_future(dial())}
    (refused,), (waiting,) = await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert "worker 0 has already dialled home" in str(refused.exception())
    waiting.cancel()


async def test_process_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(ArealError, match="worker 0 must be started by a driver"):
        await dial_home("worker", 0, wire=api_wire())
