import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from areal.infra.heartbeat import FreezeWatch
from areal.infra.rpc.connect import DriverListener
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, LocalScheduler

pytestmark = pytest.mark.slow

SECONDS = 2.0
CHILD = """
import asyncio, sys, threading
from areal.infra.rpc.connect import connect_to_driver
from areal.infra.rpc.wire import api_wire

async def main():
    handlers = {"block": threading.Event().wait}
    driver = await connect_to_driver("worker", 0, {}, handlers, wire=api_wire())
    await driver.closed

print("the last thing it said", flush=True)
asyncio.run(main())
"""


@pytest.fixture
async def driver() -> AsyncIterator[DriverListener]:
    driver = DriverListener(api_wire())
    await driver.open()
    yield driver
    await driver.close()


async def start(scheduler: LocalScheduler, driver: DriverListener, log: Path) -> Any:
    argv = [sys.executable, "-c", CHILD]
    placement = await scheduler.start(Command("engine", argv, log, dict(driver.env), SECONDS, driver.secret))
    return placement, await driver.expect("worker", 0, placement, timeout_seconds=60)


async def test_stopped_process_is_killed_and_named_as_frozen(
    scheduler: LocalScheduler, driver: DriverListener, tmp_path: Path
) -> None:
    placement, _ = await start(scheduler, driver, tmp_path / "log.txt")
    os.kill(placement.pid, signal.SIGSTOP)
    assert await asyncio.wait_for(placement.wait(), 30) == -signal.SIGKILL
    assert placement.describe_exit() == (
        f"engine (pid {placement.pid}) was frozen (no sign of life for 2 s; a signal or a debugger has stopped it), so "
        f"it was killed; its log {tmp_path / 'log.txt'} ends with: the last thing it said"
    )


async def test_process_whose_event_loop_is_blocked_is_not_frozen(
    scheduler: LocalScheduler, driver: DriverListener, tmp_path: Path
) -> None:
    placement, process = await start(scheduler, driver, tmp_path / "log.txt")
    process.channel.notify("block")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(placement.wait(), 3 * SECONDS)
    await placement.stop(grace_seconds=0)
    assert "frozen" not in placement.describe_exit()


async def test_process_that_is_stopped_before_it_connects_is_frozen_too(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    placement = await scheduler.start(Command("engine", argv, tmp_path / "log.txt", heartbeat_seconds=0.1))
    os.kill(placement.pid, signal.SIGSTOP)
    assert await asyncio.wait_for(placement.wait(), 30) == -signal.SIGKILL
    assert "was frozen" in placement.describe_exit()


class SilentProcess:
    """A process that gives one sign of life, when it has started, and no more."""

    def __init__(self, code: str, seconds: float) -> None:
        argv = [sys.executable, "-c", f"print(flush=True)\n{code}"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"\n"
        self._watch = FreezeWatch(self._process.pid, seconds, time.monotonic())
        self._watch.beat(time.monotonic())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def next_check(self) -> str:
        """What its keeper finds when it is due to look again."""
        await asyncio.sleep(self._watch.due - time.monotonic())
        return self._watch.check(time.monotonic())

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


async def test_silent_process_that_does_not_compute_is_frozen() -> None:
    process = SilentProcess("import signal; signal.pause()", 0.3)
    try:
        for _ in range(100):
            if why := await process.next_check():
                assert "it does not compute either" in why
                return
        pytest.fail("it was never found frozen")
    finally:
        process.end()


async def test_silent_process_that_computes_is_not_frozen() -> None:
    process = SilentProcess("while True: pass", 0.5)
    try:
        for _ in range(40):
            assert await process.next_check() == ""
            if process.processor_seconds() > 2.0:  # four times as long as it may be silent
                return
        pytest.fail("this machine gave it no processor")
    finally:
        process.end()


async def test_silent_process_that_others_leave_no_processor_is_not_frozen() -> None:
    process, other = SilentProcess("while True: pass", 0.2), SilentProcess("while True: pass", 60)
    try:
        for each in (process, other):
            os.sched_setaffinity(each.pid, [min(os.sched_getaffinity(0))])
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        assert [await process.next_check() for _ in range(10)] == [""] * 10
    finally:
        other.end()
        os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))  # also to die it needs a processor
        process.end()
