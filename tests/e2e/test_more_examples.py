"""The other examples as their READMEs start them, made small: each trains, and by its own script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_runs import ROOT, SMALL, Run

Start = Callable[..., Run]


def train(start: Start, name: str, *settings: str) -> Run:
    folder = ROOT / "examples" / name
    return start(folder / "train.py", "--config", folder / "config.yaml", "trial_name=one", *SMALL, *settings)


def left_by(run: Run, tmp_path: Path, experiment: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the steps of a run that ended well."""
    assert run.wait() == 0, run.text
    path = tmp_path / "runs" / experiment / "one"
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return json.loads((path / "summary.json").read_text()), [row for row in metrics if "reward" in row]


def test_multi_turn_example_trains_with_its_own_setting(start: Start, tmp_path: Path) -> None:
    quick = (  # on the model that other tests have made already
        "actor.path=builtin:tiny-math",
        "reward_fn=areal.reward.exact_match_reward",
        "train_dataset.path=builtin:sort-digits",
        "valid_dataset.path=builtin:sort-digits",
    )
    run = train(start, "multi_turn", "total_train_steps=2", "max_turns=3", *quick)
    summary, steps = left_by(run, tmp_path, "multi-turn")
    assert summary["rejections"] == {}
    assert summary["max_logprob_difference"] < 1e-4
    for step in steps:
        assert 1 < step["rollout/turns"] <= 3
        assert step["rollout/first_try"] <= step["rollout/success"] == pytest.approx(step["reward"])
