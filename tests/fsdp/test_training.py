"""Whole runs on ranks: the example agent, and what happens to it when a rank dies."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from real_runs import COMPARED, CONFIG, SCRIPT, SMALL, Run, rows_of, summary_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs/sort-digits/one"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    """Those that a test has started."""
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def start(runs: list[Run], cwd: Path, *settings: str) -> Run:
    runs.append(Run([SCRIPT, "--config", CONFIG, "trial_name=one", *SMALL, *settings], cwd))
    return runs[-1]


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:d1t2"])
def test_example_agent_trains_on_two_ranks_and_replays_to_the_bit(
    backend: str, runs: list[Run], tmp_path: Path, run_dir: Path
) -> None:
    run = start(runs, tmp_path, "total_train_steps=6", f"actor.backend={backend}", *COMPARED)
    assert run.wait() == 0, run.text
    metrics = [row for row in rows_of(run_dir / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == list(range(1, 7))
    assert max(row["max_logprob_difference"] for row in metrics if "max_logprob_difference" in row) < 1e-4
    assert metrics[-1]["kl"] > 0
    assert {"rank 0", "rank 1"} < set(summary_of(run_dir)["cpu_seconds"])
    words = [sys.executable, "-m", "areal.cli.main", "replay", str(run_dir), "--json"]
    replayed = subprocess.run(words, capture_output=True, timeout=300)
    assert replayed.returncode == 0, replayed.stderr.decode()
    assert json.loads(replayed.stdout)["bit_equal"] == 6


def test_critic_trains_on_the_ranks_of_its_actor_and_is_resumed(runs: list[Run], tmp_path: Path, run_dir: Path) -> None:
    settings = ("actor.backend=fsdp:d2", "critic.path=builtin:tiny-math", "actor.group_baseline=none", "saver.keep=9")
    run = start(runs, tmp_path, "total_train_steps=40", *settings)
    run.wait_for(r"^step [4-9]/40 ")
    run.kill(signal.SIGINT)
    assert run.wait() == 130, run.text
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert list((saved / "critic").glob("*.safetensors"))
    reached = int(saved.name.removeprefix("step-"))
    run = start(runs, tmp_path, f"total_train_steps={reached + 3}", *settings)
    assert run.wait() == 0, run.text
    metrics = [row for row in rows_of(run_dir / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in metrics] == list(range(1, reached + 4))
    assert all(row["critic/grad_norm"] > 0 for row in metrics)


def test_ten_steps_of_the_example_agent_end_with_the_weights_of_one_process(runs: list[Run], tmp_path: Path) -> None:
    settings = ("total_train_steps=10", "rollout.max_head_offpolicyness=0", "actor.recompute_logprob=true")
    found = {}
    for trial, backend in (("alone", ""), ("ranks", "fsdp:d2")):
        run = start(runs, tmp_path, *settings, f"trial_name={trial}", f"actor.backend={backend}")
        assert run.wait() == 0, run.text
        run_dir = tmp_path / "runs/sort-digits" / trial
        files = (run_dir / "checkpoints/step-000010").glob("model*.safetensors")
        weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
        answers = [(row["task_id"], row["messages"]) for row in rows_of(run_dir / "rollouts.jsonl")]
        found[trial] = weights, answers
    assert found["ranks"][1] == found["alone"][1], "the same seeds, and weights that differ in their last digits"
    torch.testing.assert_close(found["ranks"][0], found["alone"][0], atol=1e-4, rtol=0)


def test_killed_rank_ends_all_and_the_run_goes_on_from_its_checkpoint(
    runs: list[Run], tmp_path: Path, run_dir: Path
) -> None:
    settings = ("total_train_steps=40", "saver.freq_steps=4", "rollout.max_head_offpolicyness=0")
    run = start(runs, tmp_path, "actor.backend=fsdp:d2", *settings)
    run.wait_for(r"^step (8|9|10|11)/40 ")
    victim = next(pid for pid, command in run.descendants().items() if re.search("sharded.rank 1$", command.strip()))
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert f"rank 1 (pid {victim}) was killed by signal 9 (SIGKILL)" in run.text
    assert "the run goes on from its newest checkpoint" in run.text
    assert "Traceback" not in run.text
    metrics = rows_of(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics if "reward" in row] == list(range(1, 41))
    tasks = [row["task_id"] for row in rows_of(run_dir / "rollouts.jsonl")]
    assert {tasks.count(task) for task in tasks} == {4}, "a group was trained twice, or in part"


def test_ranks_that_die_again_and_again_end_the_run(runs: list[Run], tmp_path: Path) -> None:
    run = start(runs, tmp_path, "actor.backend=fsdp:d2", "total_train_steps=200", "scheduler.max_restarts=0")
    run.wait_for(r"^step 10/200 ")
    victim = next(pid for pid, command in run.descendants().items() if re.search("sharded.rank 0$", command.strip()))
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 2, run.text
    assert f"rank 0 (pid {victim}) was killed by signal 9 (SIGKILL)" in run.text
    assert run.descendants() == {}
