"""A driver on the login node of the tests' Slurm cluster."""

import os
import sys
from pathlib import Path

from cluster_driver import CONFIG, ROOT, SMALL, ClusterDriver

from benchmarks.clusters import SlurmCluster

ON_SLURM = ("scheduler.type=slurm", "scheduler.nodes=2")
SCRIPT = """
import sys; from areal import PPOTrainer; from areal.api.cli_args import GRPOConfig, load_expr_config
{definitions}
if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    with PPOTrainer(config) as trainer: trainer.train(workflow=config.workflow, workflow_kwargs={{{arguments}}})
"""


class Driver(ClusterDriver):
    """A script that asks Slurm for an allocation by itself."""

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
        argv = [sys.executable, str(script), "--config", str(CONFIG), *SMALL, *ON_SLURM, *settings]
        argv += [f"output_dir={output_dir}"] if output_dir else []
        env = {**cluster.env, "PYTHONPATH": os.pathsep.join((str(directory), str(ROOT)))}
        super().__init__(argv, directory / "driver.log", output_dir or directory / "runs", directory, env)
