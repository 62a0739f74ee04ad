"""The example as the README starts it: every agent trains, and a run leaves everything that it promises."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_runs import CONFIG, Run

AGENTS = "areal.workflow.openai.math_agent"
Example = Callable[..., Run]


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_synchronous_run_leaves_everything_and_both_sides_compute_the_same(example: Example, tmp_path: Path) -> None:
    run = example("total_train_steps=3", "rollout.max_head_offpolicyness=0", "saver.freq_steps=1", "saver.keep=2")
    assert run.wait() == 0, run.text
    path = tmp_path / "runs/sort-digits/one"
    summary, metrics = summary_of(path), rows(path / "metrics.jsonl")
    assert re.search(r"^held-out success \d\.\d\d → \d\.\d\d in \d+ s$", run.text, re.MULTILINE)
    assert summary["verdict"] in run.lines
    assert summary["overlap"] == pytest.approx(0, abs=0.02)
    assert summary["max_logprob_difference"] < 1e-4
    assert summary["weight_pause_seconds"] == {}  # nothing was running
    assert {"driver", "engine", "rollout worker 0"} == summary["cpu_seconds"].keys()
    steps = [row for row in metrics if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {row["staleness_max"] for row in steps} == {0.0}
    assert [row["step"] for row in metrics if "eval_reward" in row] == [0, 3]
    rollouts = rows(path / "rollouts.jsonl")
    assert len(rollouts) == 3 * 4 * 4
    assert [message["role"] for message in rollouts[0]["messages"]] == ["user", "assistant"]
    assert [each.name for each in sorted((path / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert (path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((path / "tensorboard").glob("events.out.tfevents.*"))
    assert {each.name for each in (path / "logs").iterdir()} == {"engine.log", "rollout-worker-0.log"}
    assert f"areal chat {path.relative_to(tmp_path)}/checkpoints/step-000003" in run.text


def test_a_bfloat16_engine_is_not_trusted_with_log_probs(example: Example, tmp_path: Path) -> None:
    settings = ["total_train_steps=2", "rollout.dtype=bfloat16", "actor.gradient_checkpointing=true"]
    run = example(*settings)
    assert run.wait() == 0, run.text
    assert summary_of(tmp_path / "runs/sort-digits/one")["max_logprob_difference"] < 1e-4  # the trainer's own
    run = example(*settings, "actor.recompute_logprob=false", "trial_name=two")
    assert run.wait() == 0, run.text
    assert summary_of(tmp_path / "runs/sort-digits/two")["max_logprob_difference"] > 1e-4


@pytest.mark.parametrize(
    ("agent", "settings"),
    [
        ("MultiTurnMathAgent", ["rollout.agent.export_style=concat", "rollout.agent.turn_discount=0.9"]),
        ("MathToolAgent", ["train_dataset.path=builtin:sums", "valid_dataset.path=builtin:sums"]),
    ],
)
def test_the_other_agents_train_by_changing_only_the_workflow(
    example: Example, tmp_path: Path, agent: str, settings: list[str]
) -> None:
    run = example("total_train_steps=2", f"workflow={AGENTS}.{agent}", *settings)
    assert run.wait() == 0, run.text
    path = tmp_path / "runs/sort-digits/one"
    assert summary_of(path)["steps"] == 2
    assert summary_of(path)["rejections"] == {}
    assert summary_of(path)["max_logprob_difference"] < 1e-4
    assert max(row["calls"] for row in rows(path / "rollouts.jsonl")) > 1


def test_sixty_steps_of_rlvr_raise_held_out_success(start: Example, tmp_path: Path) -> None:
    run = start(
        "-m", "areal.cli.main", "train", "--config", CONFIG, "trial_name=one", "total_train_steps=60",
        "workflow=areal.workflow.RLVRWorkflow", "reward_fn=areal.reward.exact_match_reward",
        "valid_dataset.size=256", "rollout.num_workers=1", "evaluator.freq_steps=null",
    )  # fmt: skip
    assert run.wait(240) == 0, run.text
    summary = summary_of(tmp_path / "runs/sort-digits/one")
    assert summary["held_out"]["after"]["reward"] > summary["held_out"]["before"]["reward"] + 0.1, summary["verdict"]
