"""A driver of the tests on a cluster: the example agent with small settings, followed while it trains."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import areal
from benchmarks.clusters import until

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
)
RUN_SECONDS = 240.0
AGENT = """
from areal.workflow.openai.math_agent import MathAgent

class OwnAgent(MathAgent):
    '''In a module that no other host has.'''
"""


class ClusterDriver:
    def __init__(
        self, argv: Sequence[str], log: Path, output_dir: Path, cwd: Path | None = None, env: Mapping[str, str] = {}
    ) -> None:
        self.run_dir = output_dir / "sort/one"
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                argv, cwd=cwd, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT
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
        path = self.run_dir / name
        if path.suffix == ".json":
            return json.loads(path.read_text())
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.read("metrics.jsonl") if "loss" in row]

    def rollouts(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.read("rollouts.jsonl")
        return rows

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.text
            return len(self.steps()) >= step

        until(reached, RUN_SECONDS, f"step {step}")
