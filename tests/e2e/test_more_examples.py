"""The other examples as their READMEs start them, made small."""

from pathlib import Path

import pytest
from real_runs import COMPARED, ROOT, SMALL, Start, rows_of, sides_agree, summary_of

QUICK = (
    "actor.path=builtin:tiny-math",
    "train_dataset.path=builtin:sort-digits",
    "valid_dataset.path=builtin:sort-digits",
    "reward_fn=areal.reward.exact_match_reward",
    "total_train_steps=2",
    "trial_name=one",
)
"""On the model that other tests have made already."""


def test_multi_turn_example_trains_with_its_own_setting(start: Start, tmp_path: Path) -> None:
    folder = ROOT / "examples/multi_turn"
    run = start(folder / "train.py", "--config", folder / "config.yaml", "max_turns=3", *SMALL, *QUICK, *COMPARED)
    assert run.wait() == 0, run.text
    run_dir = tmp_path / "runs/multi-turn/one"
    summary = summary_of(run_dir)
    assert summary["rejections"] == {}
    assert sides_agree(summary)
    for step in (row for row in rows_of(run_dir / "metrics.jsonl") if "reward" in row):
        assert 1 < step["rollout/turns"] <= 3
        assert step["rollout/first_try"] <= step["rollout/success"] == pytest.approx(step["reward"])


def test_example_without_a_script_trains_by_the_command_line(start: Start, tmp_path: Path) -> None:
    config = ROOT / "examples/countdown/config.yaml"
    run = start("-m", "areal.cli.main", "train", "--config", config, *SMALL, *QUICK)
    assert run.wait() == 0, run.text
    summary = summary_of(tmp_path / "runs/countdown/one")
    assert (summary["steps"], summary["rejections"]) == (2, {})


def test_search_agent_is_warmed_up_and_trains(start: Start, tmp_path: Path) -> None:
    run = start("-m", "examples.search_agent.warm_up", "total_train_steps=2", "train_dataset.batch_size=4")
    assert run.wait() == 0, run.text
    config = ROOT / "examples/search_agent/config.yaml"
    words = ["total_train_steps=2", "trial_name=one", "actor.ppo_n_minibatches=1", "gconfig.max_new_tokens=8"]
    run = start("-m", "areal.cli.main", "train", "--config", config, *SMALL, *words)
    assert run.wait() == 0, run.text
    summary = summary_of(tmp_path / "runs/search-agent/one")
    assert (summary["steps"], summary["rejections"]) == (2, {})
    assert {row["messages"][0]["role"] for row in rows_of(tmp_path / "runs/search-agent/one/rollouts.jsonl")} == {
        "user"
    }
