"""A run on a real Ray cluster whose two nodes are hosts that share neither loopback, shared memory nor /tmp."""

import signal
import time
from pathlib import Path

import pytest
from cluster_driver import RUN_SECONDS
from ray_driver import Driver

from benchmarks.clusters import Hosts, RayCluster, until, why_no_hosts

GONE_SECONDS = 3.0
pytestmark = [
    pytest.mark.timeout(2 * RUN_SECONDS),
    pytest.mark.skipif(why_no_hosts() is not None, reason=why_no_hosts() or ""),
]


def test_an_agent_trains_across_two_hosts_that_have_neither_the_model_nor_its_module(
    hosts: Hosts, ray_hosts: RayCluster, tiny_math: Path, tmp_path: Path
) -> None:
    settings = ("total_train_steps=5", "actor.kl_ctl=1e-4", "ref.path=/tmp/run/model")
    driver = Driver(hosts, ray_hosts, tiny_math, tmp_path / "log", *settings)
    try:
        driver.until_step(1)
        assert all(hosts.of_runs() & hosts.processes(name) for name in hosts.names), "each host has its engine"
        assert driver.wait() == 0, driver.text
    finally:
        driver.end()
    rollouts = driver.rollouts()
    assert len(rollouts) == 5 * 4 * 4
    assert {row["reward"] for row in rollouts} == {0.0, 1.0}
    assert max(row["version_max"] for row in rollouts) > 0, "new weights reached the engines"
    difference = driver.read("summary.json")["max_logprob_difference"]
    assert 0 < difference < 1e-4, "the trainer computes what the engines on both hosts sampled"
    until(lambda: not hosts.of_runs(), 5, "hosts without processes of the run")


def test_an_impossible_placement_ends_the_run_with_its_reason(
    hosts: Hosts, ray_hosts: RayCluster, tiny_math: Path, tmp_path: Path
) -> None:
    settings = ("rollout.gpus=8", "scheduler.place_seconds=3")
    driver = Driver(hosts, ray_hosts, tiny_math, tmp_path / "log", *settings)
    try:
        assert driver.wait() != 0
    finally:
        driver.end()
    assert "the Ray cluster gave no place within 3 s" in driver.text
    assert "it has 8 cpus" in driver.text
    assert "Traceback" not in driver.text


def test_kill_9_of_the_driver_leaves_nothing_on_any_host(
    hosts: Hosts, ray_hosts: RayCluster, tiny_math: Path, tmp_path: Path
) -> None:
    driver = Driver(hosts, ray_hosts, tiny_math, tmp_path / "log", "total_train_steps=500")
    try:
        driver.until_step(2)
        assert hosts.of_runs() - {driver.process.pid}
        driver.process.send_signal(signal.SIGKILL)
        driver.process.wait(10)
        began = time.monotonic()
        until(lambda: not hosts.of_runs(), 20, "hosts without processes of the run")
        took = time.monotonic() - began
        assert took < GONE_SECONDS, f"it took {took:.1f} s"
    finally:
        driver.end()


def test_a_pulled_cable_is_noticed(hosts: Hosts, ray_hosts: RayCluster, tiny_math: Path, tmp_path: Path) -> None:
    driver = Driver(hosts, ray_hosts, tiny_math, tmp_path / "log", "total_train_steps=500")
    other = hosts.names[-1]
    try:
        driver.until_step(2)
        hosts.pull_cable(other)
        began = time.monotonic()
        until(lambda: "was lost with its" in driver.text, 30, "a line that says which process was lost")
        assert time.monotonic() - began < 15, "noticed within ten seconds, and written down"
        until(lambda: not hosts.of_runs() & hosts.processes(other), 10, "end of the processes that nobody reaches")
    finally:
        driver.end()
        hosts.plug_cable(other)
        ray_hosts.start(other)  # Ray takes no node back that it has given up
    until(lambda: not hosts.of_runs(), 10, "hosts without processes of the run")
