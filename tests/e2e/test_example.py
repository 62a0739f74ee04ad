"""The example as the README starts it: every agent trains, and a run leaves everything that it promises."""

import re
from pathlib import Path
from typing import Any

import pytest
from real_runs import COMPARED, CONFIG, Start, rows_of, sides_agree, summary_of

AGENTS = "areal.workflow.openai.math_agent"


def test_synchronous_run_leaves_everything_and_both_sides_compute_the_same(
    example: Start, tmp_path: Path, run_dir: Path
) -> None:
    settings = ["total_train_steps=3", "rollout.max_head_offpolicyness=0", "saver.freq_steps=1", "saver.keep=2"]
    run = example(*settings, *COMPARED)
    assert run.wait() == 0, run.text
    summary, metrics = summary_of(run_dir), rows_of(run_dir / "metrics.jsonl")
    assert re.search(
        r"^held-out success \d\.\d\d → \d\.\d\d in \d+ s \(95 %: \d\.\d\d–\d\.\d\d → \d\.\d\d–\d\.\d\d, "
        r"difference [+-]\d\.\d\d to [+-]\d\.\d\d\)$",
        run.text,
        re.MULTILINE,
    )
    assert summary["verdict"] in run.lines
    assert summary["overlap"] == pytest.approx(0, abs=0.02)
    assert sides_agree(summary)
    assert summary["weight_pause_seconds"] == {}  # nothing was running
    assert {"driver", "engine", "rollout worker 0"} == summary["cpu_seconds"].keys()
    steps = [row for row in metrics if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {row["staleness_max"] for row in steps} == {0.0}
    assert [row["step"] for row in metrics if "eval_reward" in row] == [0, 3]
    rollouts = rows_of(run_dir / "rollouts.jsonl")
    assert len(rollouts) == 3 * 4 * 4
    assert [message["role"] for message in rollouts[0]["messages"]] == ["user", "assistant"]
    assert [each.name for each in sorted((run_dir / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert (run_dir / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert {each.name for each in (run_dir / "logs").iterdir()} == {"engine.log", "rollout-worker-0.log"}
    assert f"talk to it  areal chat {run_dir.relative_to(tmp_path)}" in run.lines


def test_log_probs_of_a_bfloat16_engine_are_recomputed(example: Start, run_dir: Path) -> None:
    settings = ["total_train_steps=2", "rollout.dtype=bfloat16", "actor.gradient_checkpointing=true", *COMPARED]
    run = example(*settings)
    assert run.wait() == 0, run.text
    assert [row["recomputed"] for row in training_rows(run_dir)] == [1, 1]
    # Synchronous, so that every token comes from the weights that are trained and can be compared.
    run = example(*settings, "actor.recompute_logprob=false", "rollout.max_head_offpolicyness=0", "trial_name=two")
    assert run.wait() == 0, run.text
    rows = training_rows(run_dir.with_name("two"))
    assert [row["recomputed"] for row in rows] == [0, 0]
    compared = [row["max_logprob_difference"] for row in rows]
    assert min(compared) > 1e-4
    assert summary_of(run_dir.with_name("two"))["max_logprob_difference"] == max(compared)


def training_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run_dir / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    ("agent", "settings"),
    [
        ("MultiTurnMathAgent", ["rollout.agent.export_style=concat", "rollout.agent.turn_discount=0.9"]),
        ("MathToolAgent", ["train_dataset.path=builtin:sums", "valid_dataset.path=builtin:sums"]),
    ],
)
def test_the_other_agents_train_by_changing_only_the_workflow(
    example: Start, run_dir: Path, agent: str, settings: list[str]
) -> None:
    run = example("total_train_steps=2", f"workflow={AGENTS}.{agent}", *settings, *COMPARED)
    assert run.wait() == 0, run.text
    summary = summary_of(run_dir)
    assert (summary["steps"], summary["rejections"]) == (2, {})
    assert sides_agree(summary)
    assert max(row["calls"] for row in rows_of(run_dir / "rollouts.jsonl")) > 1


def test_sixty_steps_of_rlvr_raise_held_out_success(start: Start, run_dir: Path) -> None:
    run = start(
        "-m", "areal.cli.main", "train", "--config", CONFIG, "trial_name=one", "total_train_steps=60",
        "workflow=areal.workflow.RLVRWorkflow", "reward_fn=areal.reward.exact_match_reward",
        "valid_dataset.size=256", "rollout.num_workers=1", "evaluator.freq_steps=null",
    )  # fmt: skip
    assert run.wait(240) == 0, run.text
    summary = summary_of(run_dir)
    assert summary["held_out"]["after"]["reward"] > summary["held_out"]["before"]["reward"] + 0.1, summary["verdict"]
