import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from areal.api.errors import ArealError, ProcessDied
from areal.infra.rpc.channel import ChannelClosed
from areal.infra.rpc.connect import ADDRESS_VARIABLE, DriverListener, connect, connect_to_driver
from areal.infra.rpc.wire import api_wire

pytestmark = pytest.mark.slow

CHILD = r'''
import asyncio, os, subprocess, sys
from areal.infra.rpc.wire import api_wire
from areal.infra.rpc.connect import connect_to_driver

SNOOP = """
import os, sys
def read(name):
    with open(name, "rb", buffering=0) as file:
        return file.read(1 << 20) or b""
places = ["environ", "cmdline"] + [f"fd/{number}" for number in range(20)]
for pid in (os.getpid(), os.getppid()):
    for place in places:
        path = f"/proc/{pid}/{place}"
        if place.startswith("fd/") and not (os.path.exists(path) and os.readlink(path).startswith("pipe:")):
            continue
        if place.startswith("fd/"):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                sys.stdout.buffer.write(os.read(descriptor, 1 << 20))
            except BlockingIOError:
                pass
        else:
            sys.stdout.buffer.write(read(path))
sys.stdout.buffer.write(sys.stdin.buffer.read())
"""

def snoop():
    """What a process that this one starts can read of itself and of this one."""
    return subprocess.run([sys.executable, "-c", SNOOP], stdout=subprocess.PIPE, check=True).stdout

async def main():
    handlers = {"add": lambda a, b: a + b, "snoop": snoop}
    driver = await connect_to_driver("worker", 0, {"pid": os.getpid()}, handlers, wire=api_wire())
    driver.notify("started", "at once")
    await driver.closed

asyncio.run(main())
'''


@pytest.fixture
async def driver() -> AsyncIterator[DriverListener]:
    driver = DriverListener(api_wire())
    await driver.open()
    yield driver
    await driver.close()


async def test_process_connects_says_who_it_is_and_can_be_called(driver: DriverListener, start: Any) -> None:
    placement = await start(CHILD, secret=driver.secret, **driver.env)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    process = await driver.expect("worker", 0, placement, timeout_seconds=30, handlers={"started": started.set_result})
    assert process.info == {"pid": placement.pid}
    assert await process.channel.call("add", 1, 2, timeout_seconds=10) == 3
    assert await asyncio.wait_for(started, 10) == "at once"


async def test_secret_is_nowhere_that_an_agent_can_read_it(driver: DriverListener, start: Any) -> None:
    placement = await start(CHILD, secret=driver.secret, **driver.env)
    process = await driver.expect("worker", 0, placement, timeout_seconds=30)
    seen = await process.channel.call("snoop", timeout_seconds=30)
    assert ADDRESS_VARIABLE.encode() in seen, "it has looked"
    assert driver.secret not in seen


async def test_process_that_gets_no_secret_says_so(driver: DriverListener, start: Any) -> None:
    placement = await start(CHILD, **driver.env)
    with pytest.raises(ProcessDied, match=r"worker 0 must be started by a driver, which .* sends its secret"):
        await driver.expect("worker", 0, placement, timeout_seconds=30)


async def test_process_ends_when_the_driver_hangs_up(driver: DriverListener, start: Any) -> None:
    placement = await start(CHILD, secret=driver.secret, **driver.env)
    process = await driver.expect("worker", 0, placement, timeout_seconds=30)
    assert await process.channel.call("add", 1, 2, timeout_seconds=10) == 3
    await process.channel.close()
    assert await asyncio.wait_for(placement.wait(), 10) == 0


async def test_process_that_ends_before_it_connects_is_reported_at_once(driver: DriverListener, start: Any) -> None:
    placement = await start("raise SystemExit('no such model')", secret=driver.secret, **driver.env)
    with pytest.raises(ProcessDied, match=r"rollout worker 0 \(pid \d+\) exited with code 1: no such model"):
        await driver.expect("worker", 0, placement, timeout_seconds=600)


async def test_process_that_never_connects_is_given_up_with_its_log(driver: DriverListener, start: Any) -> None:
    placement = await start("import signal; signal.pause()", secret=driver.secret, **driver.env)
    with pytest.raises(ProcessDied, match=r"did not connect to the driver within 0.05 s; its log is \S+log.txt"):
        await driver.expect("worker", 0, placement, timeout_seconds=0.05)


async def test_killed_process_fails_its_calls_by_name(driver: DriverListener, start: Any) -> None:
    placement = await start(CHILD, secret=driver.secret, **driver.env)
    process = await driver.expect("worker", 0, placement, timeout_seconds=30)
    os.kill(placement.pid, signal.SIGSTOP)  # so that the call is certainly in flight
    call = asyncio.ensure_future(process.channel.call("add", 1, 2, timeout_seconds=60))
    await asyncio.sleep(0)
    os.kill(placement.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed, match="rollout worker 0"):
        await call


async def test_second_process_of_one_index_is_refused(driver: DriverListener, stack: Any) -> None:
    async def hello() -> None:
        channel = await connect(driver.env[ADDRESS_VARIABLE], wire=api_wire(), secret=driver.secret)
        stack.push_async_callback(channel.close)
        await channel.call("hello", "worker", 0, {}, timeout_seconds=10)

    hellos = {asyncio.ensure_future(hello()), asyncio.ensure_future(hello())}
    (refused,), (waiting,) = await asyncio.wait(hellos, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert "worker 0 is already connected" in str(refused.exception())
    waiting.cancel()


async def test_process_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(ArealError, match="worker 0 must be started by a driver"):
        await connect_to_driver("worker", 0, wire=api_wire())
