"""The scheduler over a real Slurm cluster: output and deaths come home, and nothing stays on any host."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal.infra.scheduler import Ask, Command, Scheduler
from areal.infra.scheduler.slurm import SlurmLauncher
from benchmarks.clusters import LOGIN, Hosts, SlurmCluster, until

GONE_SECONDS = 3.0
WITH_DAEMON = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", os.uname().nodename, flush=True)
        while True:
            signal.pause()
    os._exit(0)
os.wait()
while True:
    signal.pause()
"""
DRIVER = f"""
import asyncio, sys
from pathlib import Path
from areal.infra.scheduler import Ask, Command, Scheduler
from areal.infra.scheduler.slurm import SlurmLauncher

async def main():
    scheduler = Scheduler(SlurmLauncher(nodes=2))
    names = ["worker 0", "worker 1"]
    await scheduler.reserve([Ask(name) for name in names], 20)
    for name in names:
        argv = [sys.executable, "-c", {WITH_DAEMON!r}]
        placement = await scheduler.start(Command(name, argv, Path(sys.argv[1]) / name))
    await placement.wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _use(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))


@pytest.fixture
async def on_slurm() -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(SlurmLauncher(nodes=2))
    yield scheduler
    await scheduler.close()


def pythons(hosts: Hosts) -> set[int]:
    """Every process on the hosts that runs Python: keepers, commands and what they have started."""
    found = set()
    for name in hosts.names:
        for pid in hosts.processes(name):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            found |= {pid} if b"python" in words[0] else set()
    return found


def says(log: Path, words: str) -> bool:
    return log.exists() and words in log.read_text()


async def test_output_and_deaths_come_home_and_a_daemon_ends_with_its_command(
    on_slurm: Scheduler, hosts: Hosts, tmp_path: Path
) -> None:
    before = pythons(hosts)
    asks = [Ask("engine"), Ask("worker 0")]
    await on_slurm.reserve(asks, 20)
    assert on_slurm.host == LOGIN
    argv = [sys.executable, "-c", WITH_DAEMON]
    placements = [await on_slurm.start(Command(ask.name, argv, tmp_path / ask.name, ask=ask)) for ask in asks]
    assert {placement.host for placement in placements} == set(hosts.names)
    for placement in placements:
        log = placement.log_path
        await asyncio.to_thread(until, lambda log=log: says(log, "daemon"), 20, "a daemon on each host")
        assert says(log, placement.host)
    os.kill(placements[0].pid, signal.SIGKILL)
    assert await asyncio.wait_for(placements[0].wait(), 10) == -signal.SIGKILL
    assert f"on {placements[0].host}) was killed by signal 9 (SIGKILL)" in placements[0].describe_exit()
    await placements[1].stop(grace_seconds=0.1)
    assert placements[1].returncode == -signal.SIGKILL
    await asyncio.to_thread(until, lambda: pythons(hosts) <= before, GONE_SECONDS, "end of everything on the hosts")


async def test_command_is_started_again_at_its_place(on_slurm: Scheduler, tmp_path: Path) -> None:
    ask = Ask("worker 0", cpus=1)
    await on_slurm.reserve([ask], 20)
    where = []
    for _ in range(2):
        command = Command("worker 0", [sys.executable, "-c", "raise SystemExit(4)"], tmp_path / "log", ask=ask)
        placement = await on_slurm.start(command)
        assert await asyncio.wait_for(placement.wait(), 30) == 4
        where.append(placement.host)
    assert where[0] == where[1]


def test_kill_9_of_the_driver_leaves_nothing_on_any_host(hosts: Hosts, tmp_path: Path) -> None:
    before = pythons(hosts)
    logs = [tmp_path / "worker 0", tmp_path / "worker 1"]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], start_new_session=True)
    try:
        until(lambda: all(says(log, "daemon") for log in logs), 40, "daemon on each host")
        assert len(pythons(hosts) - before) == 6, "a keeper, a command and a daemon on each host"
    finally:
        driver.kill()
        driver.wait(10)
    until(lambda: pythons(hosts) <= before, GONE_SECONDS, "end of everything on the hosts")
