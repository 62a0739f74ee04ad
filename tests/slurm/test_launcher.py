"""Keepers are placed on the hosts of a real Slurm cluster, refused with a reason, and leave nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from areal.api.errors import PlacementRefused
from areal.infra.scheduler.base import Ask, KeeperStart
from areal.infra.scheduler.slurm import SlurmLauncher
from benchmarks.clusters import LOGIN, Hosts, SlurmCluster, until

READ_AND_SAY = "import sys, os; print(f'{os.uname().nodename} {sys.stdin.read()}'); sys.exit(3)"
"""In one write: srun puts what it says itself between two."""
WAIT = "import sys, time; sys.stdin.read(); time.sleep(600)"


@pytest.fixture(autouse=True)
def _use(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))


@pytest.fixture
async def launcher() -> AsyncIterator[SlurmLauncher]:
    launcher = SlurmLauncher(nodes=2)
    yield launcher
    await launcher.close()


def _keeper(code: str) -> KeeperStart:
    return KeeperStart([sys.executable, "-c", code], b"the secret")


async def test_a_keeper_runs_on_its_node_and_reads_the_secret(launcher: SlurmLauncher) -> None:
    asks = [Ask("engine 0", cpus=3), Ask("worker 0", cpus=3), Ask("worker 1")]
    await launcher.reserve(asks, 20)
    assert launcher.host == LOGIN
    steps = [await launcher.launch(ask, _keeper(READ_AND_SAY)) for ask in asks]
    reasons = await asyncio.wait_for(asyncio.gather(*(step.ended for step in steps)), 30)
    assert all("ended with code 3" in reason and "the secret" in reason for reason in reasons), reasons
    said = {word for reason in reasons for word in reason.split() if word in ("h1", "h2")}
    assert said == {"h1", "h2"}, reasons


async def test_the_allocation_is_given_back(launcher: SlurmLauncher, cluster: SlurmCluster) -> None:
    await launcher.reserve([Ask("engine 0", cpus=4)], 20)
    assert "areal" in cluster.run("squeue", "-h", "-o", "%j")
    await launcher.close()
    until(lambda: not cluster.run("squeue", "-h", "-o", "%j").strip(), 10, "empty queue")


async def test_a_keeper_that_does_not_end_is_killed(launcher: SlurmLauncher, hosts: Hosts) -> None:
    ask = Ask("worker 0")
    await launcher.reserve([ask], 20)
    before = _python_on(hosts)
    step = await launcher.launch(ask, _keeper(WAIT))
    until(lambda: bool(_python_on(hosts) - before), 20, "keeper on a host")
    await step.kill()
    await asyncio.wait_for(step.ended, 10)
    until(lambda: not _python_on(hosts) - before, 10, "end of the keeper")


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (Ask("engine 0", cpus=64), "configuration is not available|not granted within 3 s"),
        (Ask("engine 0", gpus=8), "Invalid generic resource|not available"),
        (Ask("engine 0", memory_mib=10**7), "Memory specification"),
    ],
)
async def test_an_impossible_ask_is_refused_with_its_reason(ask: Ask, reason: str) -> None:
    launcher = SlurmLauncher()
    with pytest.raises(PlacementRefused, match=reason) as refused:
        await launcher.reserve([ask], 3)
    assert "h1 idle" in str(refused.value)


async def test_a_busy_cluster_is_refused_at_the_deadline(launcher: SlurmLauncher, cluster: SlurmCluster) -> None:
    await launcher.reserve([Ask("first", cpus=4), Ask("second", cpus=4)], 20)
    with pytest.raises(PlacementRefused, match=r"not granted within 2 s \(Resources"):
        await SlurmLauncher(nodes=2).reserve([Ask("third", cpus=4), Ask("fourth", cpus=4)], 2)
    assert cluster.run("squeue", "-h", "-o", "%t").split() == ["R"], "the refused request must not wait in the queue"


def test_an_allocation_ends_with_its_driver_even_if_that_is_killed(cluster: SlurmCluster) -> None:
    hold = (
        "import asyncio\n"
        "from areal.infra.scheduler.base import Ask\n"
        "from areal.infra.scheduler.slurm import SlurmLauncher\n"
        "async def main():\n"
        "    await SlurmLauncher().reserve([Ask('engine 0', cpus=2)], 20)\n"
        "    print('reserved', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, env={**os.environ, **cluster.env})
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"reserved\n"
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    until(lambda: not cluster.run("squeue", "-h", "-o", "%j").strip(), 5, "empty queue")


def _python_on(hosts: Hosts) -> set[int]:
    return {pid for name in hosts.names for pid in hosts.processes(name) if "python" in _command(pid)}


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode()
    except OSError:
        return ""
