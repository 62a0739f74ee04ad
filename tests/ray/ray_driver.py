"""A driver on the head of the tests' Ray cluster over two hosts."""

import os
import shutil
import sys
from pathlib import Path

from cluster_driver import AGENT, CONFIG, ROOT, SMALL, ClusterDriver

from benchmarks.clusters import Hosts, RayCluster

NODE_CPUS = 4
ON_RAY = (
    "scheduler.type=ray",
    "rollout.backend=embedded:d2",
    "rollout.cpus=3",  # no host has room for both engines
)


class Driver(ClusterDriver):
    """`areal train` on the head's host, in a directory of its /tmp that has the model and the agent's module."""

    def __init__(
        self, hosts: Hosts, cluster: RayCluster, model: Path, log: Path, *settings: str, output_dir: Path | None = None
    ) -> None:
        """`output_dir`: None = in that directory."""
        place = hosts.path(cluster.head, "/tmp/run")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(model, place / "model")
        (place / "own_agents.py").write_text(AGENT)
        argv = [sys.executable, "-m", "areal.cli.main", "train", "--config", str(CONFIG), *SMALL, *ON_RAY]
        argv += ["actor.path=/tmp/run/model", "workflow=own_agents.OwnAgent", *settings]
        argv += [f"scheduler.ray_address={cluster.address}"]
        argv += [f"output_dir={output_dir}"] if output_dir else []
        env = {"PYTHONPATH": os.pathsep.join(("/tmp/run", str(ROOT)))}
        command = hosts.inside(cluster.head, "env", "--chdir=/tmp/run", *argv)
        super().__init__(command, log, output_dir or place / "runs", env=env)
