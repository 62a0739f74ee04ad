"""A driver on the login node of the tests' Slurm cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import areal
from benchmarks.clusters import SlurmCluster

CONFIG = Path(areal.__file__).parents[1] / "examples/agent_workflow/config.yaml"
SMALL = (
    "experiment_name=sort",
    "trial_name=one",
    "gconfig.n_samples=4",
    "train_dataset.batch_size=4",
    "valid_dataset.size=16",
    "evaluator.freq_steps=null",
    "saver.freq_steps=null",
    "scheduler.type=slurm",
    "scheduler.nodes=2",
)
RUN_SECONDS = 240
SCRIPT = """
import sys; from areal import PPOTrainer; from areal.api.cli_args import GRPOConfig, load_expr_config
{definitions}
if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    with PPOTrainer(config) as trainer: trainer.train(workflow=config.workflow, workflow_kwargs={{{arguments}}})
"""


class Driver:
    """A driver on the login node: a script that asks Slurm for an allocation by itself."""

    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        *settings: str,
        definitions: str = "",
        arguments: str = "",
        output_dir: Path | None = None,
    ) -> None:
        """The script may define something, and pass arguments to its workflow. `output_dir`: None = in `directory`."""
        script = directory / "script.py"
        script.write_text(SCRIPT.format(definitions=definitions, arguments=arguments))
        self.run_dir = (output_dir or directory / "runs") / "sort/one"
        placed = [f"output_dir={output_dir}"] if output_dir else []
        self._log = directory / "driver.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), "--config", str(CONFIG), *SMALL, *placed, *settings],
                cwd=directory,
                env={
                    **os.environ,
                    **cluster.env,
                    "PYTHONPATH": os.pathsep.join((str(directory), str(CONFIG.parents[2]))),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(RUN_SECONDS)

    def steps(self) -> list[dict[str, Any]]:
        metrics = self.run_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return [row for row in rows if "loss" in row]

    def rollouts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "rollouts.jsonl").read_text().splitlines()]
