"""Ranks on two hosts of a real Slurm cluster that share a file system, but neither loopback nor shared memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fsdp"))

from cluster_driver import ROOT
from ranks_harness import check_comparison
from slurm_driver import Driver

from benchmarks.clusters import Hosts, SlurmCluster, command_line

COMPARE = Path(__file__).parents[1] / "fsdp/compare_ranks.py"
COMPARE_SECONDS = 500
pytestmark = pytest.mark.timeout(2 * COMPARE_SECONDS)


def test_ranks_on_two_hosts_compute_what_one_process_does(cluster: SlurmCluster) -> None:
    place = cluster.config.parent / "compared"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, str(COMPARE), '{"type": "slurm", "nodes": 2}', str(place), "4"],
        env={**os.environ, **cluster.env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=COMPARE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_comparison(done.stdout)


def test_killed_rank_on_another_host_ends_all_and_the_run_goes_on(
    cluster: SlurmCluster, hosts: Hosts, tmp_path: Path
) -> None:
    driver = Driver(
        cluster,
        tmp_path,
        "actor.backend=fsdp:d2",
        "actor.cpus=3",  # no host has room for both
        "rollout.cpus=1",
        "total_train_steps=20",
        "saver.freq_steps=4",
        "rollout.max_head_offpolicyness=0",
        output_dir=cluster.config.parent / "killed",  # where all hosts see it
    )
    driver.until_step(6)
    victims = [pid for pid in hosts.of_runs() if command_line(pid).rstrip().endswith("areal.engine.sharded.rank 1")]
    os.kill(victims[0], signal.SIGKILL)
    assert driver.wait() == 0, driver.text
    assert "the run goes on from its newest checkpoint" in driver.text
    assert [row["step"] for row in driver.steps()] == list(range(1, 21))
    tasks = [row["task_id"] for row in driver.rollouts()]
    assert {tasks.count(task) for task in tasks} == {4}, "a group was trained twice, or in part"
