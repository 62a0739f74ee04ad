"""A host whose cable is pulled is noticed by the driver, and its keeper notices that the driver is out of reach."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from areal.infra.rpc.connect import DriverListener
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, Scheduler
from areal.infra.scheduler.base import Ask, KeeperStart, child_environment
from areal.infra.scheduler.local import LocalKeeper
from benchmarks.clusters import LOGIN, Hosts, until

NOTICE_SECONDS = 10.0
PAUSE = "import signal; print('here', flush=True); signal.pause()"
CONNECTED = """
import asyncio
from areal.infra.rpc.connect import connect_to_driver
from areal.infra.rpc.wire import api_wire

async def main():
    driver = await connect_to_driver("worker", 0, wire=api_wire())
    print(await driver.closed)

asyncio.run(main())
"""


class HostLauncher:
    """A `Launcher` that knows one host, by its name."""

    host = LOGIN

    def __init__(self, hosts: Hosts, name: str) -> None:
        self._hosts = hosts
        self._name = name

    async def reserve(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        return

    async def launch(self, ask: Ask, keeper: KeeperStart) -> LocalKeeper:
        pipe = asyncio.subprocess.PIPE
        argv = self._hosts.inside(self._name, *keeper.argv)
        env = child_environment(os.environ)
        return LocalKeeper(
            await asyncio.create_subprocess_exec(*argv, stdin=pipe, stderr=pipe, env=env, start_new_session=True),
            keeper.stdin,
        )

    async def close(self) -> None:
        return


@pytest.fixture
async def on_host(hosts: Hosts) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(HostLauncher(hosts, hosts.names[0]))
    yield scheduler
    hosts.plug_cable(hosts.names[0])
    await scheduler.close()


async def test_pulled_cable_is_a_death_at_the_driver_and_ends_the_processes_there(
    hosts: Hosts, on_host: Scheduler, tmp_path: Path
) -> None:
    name, before = hosts.names[0], hosts.processes(hosts.names[0])
    placement = await on_host.start(Command("worker", [sys.executable, "-c", PAUSE], tmp_path / "log.txt"))
    assert placement.host == name
    assert placement.address != LOGIN
    assert len(hosts.processes(name) - before) == 2
    hosts.pull_cable(name)
    assert await asyncio.wait_for(placement.wait(), NOTICE_SECONDS) < 0
    assert f"worker (pid {placement.pid} on {name}) was lost with its keeper" in placement.describe_exit()
    await asyncio.to_thread(until, lambda: hosts.processes(name) <= before, NOTICE_SECONDS, "end of what ran there")


async def test_idle_channel_over_a_pulled_cable_closes_at_the_driver(
    hosts: Hosts, on_host: Scheduler, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        driver = DriverListener(api_wire())
        await driver.open(f"tcp:{LOGIN}:0")
        stack.push_async_callback(driver.close)
        argv, env = [sys.executable, "-c", CONNECTED], {"PYTHONPATH": os.pathsep.join(sys.path), **driver.env}
        command = Command("worker", argv, tmp_path / "log.txt", env, secret=driver.secret)
        placement = await on_host.start(command)
        process = await driver.expect("worker", 0, placement, timeout_seconds=60)
        hosts.pull_cable(hosts.names[0])
        reason = await asyncio.wait_for(process.channel.closed, NOTICE_SECONDS)
        assert reason != "the peer disconnected", "it cannot say so any more"
