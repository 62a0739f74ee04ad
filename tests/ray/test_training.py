"""A run on a real Ray cluster of two nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster_driver import CONFIG, SMALL

RUN_SECONDS = 110


def _train(cluster: Any, directory: Path, *settings: str) -> "subprocess.CompletedProcess[str]":
    placed = ("scheduler.type=ray", f"scheduler.ray_address={cluster.address}")
    argv = ["train", "--config", str(CONFIG), *SMALL, *placed, *settings]
    return subprocess.run(
        [sys.executable, "-m", "areal.cli.main", *argv],
        cwd=directory,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


def test_an_agent_trains_on_two_nodes(cluster: Any, tiny_math: Path, tmp_path: Path) -> None:
    done = _train(
        cluster,
        tmp_path,
        "total_train_steps=5",
        "rollout.backend=embedded:d2",
        "rollout.cpus=3",  # no node has room for both engines
        "actor.kl_ctl=1e-4",
        "ref.path=builtin:tiny-math",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs/sort/one"
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 5 * 4 * 4
    assert {row["reward"] for row in rollouts} == {0.0, 1.0}
    assert max(row["version_max"] for row in rollouts) > 0, "new weights reached the engines"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert 0 < summary["max_logprob_difference"] < 1e-4, "the trainer computes what the engines sampled"


def test_an_impossible_placement_ends_the_run_with_its_reason(cluster: Any, tiny_math: Path, tmp_path: Path) -> None:
    done = _train(cluster, tmp_path, "rollout.gpus=8", "scheduler.place_seconds=3")
    assert done.returncode != 0
    assert "the Ray cluster gave no place within 3 s" in done.stderr
    assert "it has 8 cpus" in done.stderr
    assert "Traceback" not in done.stderr
