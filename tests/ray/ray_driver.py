"""A driver on the head of the tests' Ray cluster over two hosts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import areal
from benchmarks.clusters import Hosts, RayCluster, until

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


class Driver:
    """`areal train` on the head's host, in a directory of its /tmp that has the model and the agent's module."""

    def __init__(
        self, hosts: Hosts, cluster: RayCluster, model: Path, log: Path, *settings: str, output_dir: Path | None = None
    ) -> None:
        """`output_dir`: None = in that directory."""
        self._log = log
        self._place = hosts.path(cluster.head, "/tmp/run")
        self._runs = output_dir or self._place / "runs"
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(model, self._place / "model")
        (self._place / "own_agents.py").write_text(AGENT)
        argv = [sys.executable, "-m", "areal.cli.main", "train", "--config", str(CONFIG), *SMALL]
        argv += ["actor.path=/tmp/run/model", "workflow=own_agents.OwnAgent", *settings]
        argv += [f"scheduler.ray_address={cluster.address}"]
        argv += [f"output_dir={output_dir}"] if output_dir else []
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
        path = self._runs / "sort/one" / name
        if path.suffix == ".json":
            return json.loads(path.read_text())
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.text
            return sum("loss" in row for row in self.read("metrics.jsonl")) >= step

        until(reached, RUN_SECONDS, f"step {step}")
