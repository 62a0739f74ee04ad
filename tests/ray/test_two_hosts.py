"""A run on a real Ray cluster whose two nodes are hosts that share neither loopback, shared memory nor /tmp."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import areal
from benchmarks.clusters import Hosts, RayCluster, until, why_no_hosts

ROOT = Path(areal.__file__).parents[1]
CONFIG = ROOT / "examples/agent_workflow/config.yaml"
SMALL = (
    "experiment_name=sort",
    "trial_name=one",
    "gconfig.n_samples=4",
    "train_dataset.batch_size=4",
    "valid_dataset.size=16",
    "evaluator.freq_steps=null",
    "saver.freq_steps=null",
    "scheduler.type=ray",
    "rollout.backend=embedded:d2",
    "rollout.cpus=3",  # no host has room for both engines
)
RUN_SECONDS = 200.0
NODE_CPUS = 4
GONE_SECONDS = 3.0
AGENT = """
from areal.workflow.openai.math_agent import MathAgent

class OwnAgent(MathAgent):
    '''In a module that no other host has.'''
"""
pytestmark = [
    pytest.mark.timeout(2 * RUN_SECONDS),
    pytest.mark.skipif(why_no_hosts() is not None, reason=why_no_hosts() or ""),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(2)
    hosts.up()
    yield hosts
    hosts.down()


@pytest.fixture(scope="module")
def ray_hosts(hosts: Hosts) -> Iterator[RayCluster]:
    cluster = RayCluster(hosts, NODE_CPUS)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


class Driver:
    """`areal train` on the head's host, in a directory of its /tmp that has the model and the agent's module."""

    def __init__(self, hosts: Hosts, cluster: RayCluster, model: Path, log: Path, *settings: str) -> None:
        self._log = log
        self._place = hosts.path(cluster.head, "/tmp/run")
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(model, self._place / "model")
        (self._place / "own_agents.py").write_text(AGENT)
        argv = [sys.executable, "-m", "areal.cli.main", "train", "--config", str(CONFIG), *SMALL]
        argv += ["actor.path=/tmp/run/model", "workflow=own_agents.OwnAgent", *settings]
        argv += [f"scheduler.ray_address={cluster.address}"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                hosts.inside(cluster.head, "env", "--chdir=/tmp/run", *argv),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(("/tmp/run", str(ROOT)))},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(RUN_SECONDS)

    def end(self) -> None:
        """For a test that failed."""
        self.process.kill()
        self.process.wait(10)

    def read(self, name: str) -> Any:
        """A file of the run directory: of a `.jsonl`, its rows."""
        path = self._place / "runs/sort/one" / name
        if path.suffix == ".json":
            return json.loads(path.read_text())
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.text
            return sum("loss" in row for row in self.read("metrics.jsonl")) >= step

        until(reached, RUN_SECONDS, f"step {step}")


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
    rollouts = driver.read("rollouts.jsonl")
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
