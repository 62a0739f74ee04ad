"""Ranks on two nodes of a real Ray cluster, hosts that share a file system, but neither loopback nor shared memory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fsdp"))

from cluster_driver import ROOT
from ranks_harness import check_comparison
from ray_driver import NODE_CPUS, Driver

from benchmarks.clusters import Hosts, RayCluster, command_line, why_no_hosts

COMPARE = Path(__file__).parents[1] / "fsdp/compare_ranks.py"
COMPARE_SECONDS = 500
pytestmark = [
    pytest.mark.timeout(2 * COMPARE_SECONDS),
    pytest.mark.skipif(why_no_hosts() is not None, reason=why_no_hosts() or ""),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """Not in /tmp, of which each host has its own."""
    with TemporaryDirectory(prefix="areal-ray-", dir="/var/tmp") as directory:
        yield Path(directory)


def test_ranks_on_two_hosts_compute_what_one_process_does(hosts: Hosts, ray_hosts: RayCluster, place: Path) -> None:
    scheduler = json.dumps({"type": "ray", "ray_address": ray_hosts.address})
    argv = [sys.executable, str(COMPARE), scheduler, str(place), str(NODE_CPUS)]
    done = subprocess.run(
        hosts.inside(ray_hosts.head, *argv),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=COMPARE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_comparison(done.stdout)


def test_killed_rank_on_another_host_ends_all_and_the_run_goes_on(
    hosts: Hosts, ray_hosts: RayCluster, tiny_math: Path, place: Path
) -> None:
    driver = Driver(
        hosts,
        ray_hosts,
        tiny_math,
        place / "log",
        f"actor.path={tiny_math}",
        "actor.backend=fsdp:d2",
        "actor.cpus=3",  # no host has room for both
        "rollout.backend=embedded",
        "rollout.cpus=1",
        "total_train_steps=20",
        "saver.freq_steps=4",
        "rollout.max_head_offpolicyness=0",
        output_dir=place / "runs",
    )
    try:
        driver.until_step(6)
        victims = [pid for pid in hosts.of_runs() if command_line(pid).rstrip().endswith("areal.engine.sharded.rank 1")]
        os.kill(victims[0], signal.SIGKILL)
        assert driver.wait() == 0, driver.text
    finally:
        driver.end()
    assert "the run goes on from its newest checkpoint" in driver.text
    assert [row["step"] for row in driver.steps()] == list(range(1, 21))
    tasks = [row["task_id"] for row in driver.rollouts()]
    assert {tasks.count(task) for task in tasks} == {4}, "a group was trained twice, or in part"
