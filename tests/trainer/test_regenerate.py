"""A synchronous run is sampled again to the same tokens and weights; what differs is named, and others are refused."""

import json
import signal
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fleet_of_groups
import numpy as np
import pytest
from fleet_of_groups import FleetOfGroups, ppo_config, run, save_model
from small_runs import make_engine, make_group

from areal import PPOTrainer
from areal.api.errors import EngineError
from areal.api.messages import GroupResult
from areal.cli.main import main
from areal.config.experiment import DatasetConfig, PPOConfig
from areal.config.loader import to_dict
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import OptimizerConfig
from areal.store.schema import STORE_FILE
from areal.trainer import notices, ppo
from areal.trainer.regenerate import refusal

AGENT = "areal.workflow.openai.math_agent.MultiTurnMathAgent"
SAMPLED_BY = {"train_dataset": "config", "filter": None, "name": AGENT, "workflow": AGENT, "kwargs": {"max_turns": 2}}
Train = Callable[..., Path]


def settings(**changed: Any) -> dict[str, Any]:
    """Those of a run that can be sampled again; `changed` ones by their names, with __ for a dot."""
    values = to_dict(
        PPOConfig(rollout=RolloutConfig(max_head_offpolicyness=0), gconfig=GenerationHyperparameters(n_samples=4))
    )
    for name, value in changed.items():
        *rooms, last = name.split("__")
        room = values
        for each in rooms:
            room = room[each]
        room[last] = value
    return values


def test_a_synchronous_run_of_names_can_be_sampled_again() -> None:
    assert refusal(settings(), SAMPLED_BY) == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rollout__max_head_offpolicyness": 2}, "with rollout.max_head_offpolicyness=2 what it drew depended"),
        ({"rollout__backend": "vllm"}, "its answers came from an engine (vllm) that does not draw"),
        ({"rollout__addresses": ["http://elsewhere"]}, "its answers came from an engine"),
        ({"rollout__agent__mode": "online"}, "its agents were outside (rollout.agent.mode=online)"),
        ({"scheduler__type": "slurm"}, "it ran on other hosts (scheduler.type=slurm)"),
    ],
)
def test_runs_that_do_not_follow_from_their_seed_are_refused(changed: dict[str, Any], reason: str) -> None:
    assert refusal(settings(**changed), SAMPLED_BY).startswith(reason)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"train_dataset": "object"}, "its tasks were given to the trainer as an object"),
        ({"filter": "my.filter"}, "its groups were chosen by a function (dynamic_filter_fn: my.filter)"),
        ({"workflow": None}, f"its workflow, {AGENT}, was an object or is defined in a script"),
        ({"kwargs": None}, f"the arguments of its workflow, {AGENT}, are not plain values"),
    ],
)
def test_runs_of_objects_that_have_no_name_are_refused(changed: dict[str, Any], reason: str) -> None:
    assert refusal(settings(), {**SAMPLED_BY, **changed}).startswith(reason)


def test_a_store_that_does_not_say_who_sampled_is_refused() -> None:
    assert refusal(settings(), {}) == "its store does not say which workflow it had"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train for four steps without processes, on tasks and a workflow that have names; returns the run's directory."""
    model = save_model(tmp_path / "model", make_engine())

    def train(fails_at: int | None = None, *, recompute_logprob: bool = True) -> Path:
        config = ppo_config(tmp_path, model)
        config.rollout.max_head_offpolicyness = 0
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
        config.actor = replace(config.actor, optimizer=optimizer, recompute_logprob=recompute_logprob)
        config.train_dataset = DatasetConfig(path="builtin:sort-digits", batch_size=2)
        monkeypatch.setattr(ppo, "Fleet", lambda *args, **settings: FleetOfGroups(fails_at))
        with PPOTrainer(config) as trainer, suppress(EngineError):
            trainer.train(workflow=AGENT)
        monkeypatch.setattr(ppo, "Fleet", lambda *args, **settings: FleetOfGroups())
        return tmp_path / "test/one"

    return train


def edit(run_dir: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(run_dir / STORE_FILE) as db:
        assert db.execute(statement, values).rowcount >= 1


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_that_is_sampled_again_leads_to_the_same_bits_and_is_left_as_it_is(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train()
    before = contents(run_dir)
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--regenerate"]) == 0
    assert capsys.readouterr().out.endswith("4 of 4 steps bit-equal\n")
    assert contents(run_dir) == before


@pytest.mark.slow
def test_a_run_that_was_stopped_is_sampled_again_as_far_as_it_came(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train(fails_at=2)
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--regenerate"]) == 0
    assert capsys.readouterr().out.endswith("2 of 2 steps bit-equal\n")


@pytest.mark.slow
def test_nobody_is_sent_to_a_directory_that_is_removed(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train()

    class InterruptedFleet(FleetOfGroups):
        def take(self, count: int) -> list[GroupResult]:
            if len(self.taken) == 2 * count:
                signal.raise_signal(signal.SIGINT)
            return super().take(count)

        def call_soon(self, call: Callable[[], None]) -> None:
            call()

        def fail(self, error: Exception) -> None:
            """Nothing waits."""

    monkeypatch.setattr(ppo, "Fleet", lambda *args, **settings: InterruptedFleet())
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--regenerate"]) == 130
    told = capsys.readouterr().err
    assert notices.STOPPING in told
    assert "areal-regenerated-" not in told
    assert told.endswith("areal: interrupted\n")


@pytest.mark.slow
def test_the_first_step_that_was_sampled_otherwise_is_named(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train()

    def draw_another(task_id: int, rewards: Sequence[float]) -> GroupResult:
        group = make_group(task_id, rewards)
        if task_id == 5:
            group.episodes[1].rows[0].input_ids[-1] ^= 1
        return group

    monkeypatch.setattr(fleet_of_groups, "make_group", draw_another)
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--regenerate", "--until-divergence", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["taken"], found["bit_equal"]) == (3, 2)
    assert (found["divergence"]["step"], found["divergence"]["cause"]) == (3, "samples")
    assert "its batch was sampled otherwise: input_ids of task 5" in found["divergence"]["text"]


@pytest.mark.slow
def test_last_bits_of_the_engines_logprobs_are_no_divergence(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train(recompute_logprob=False)

    def compute_otherwise(task_id: int, rewards: Sequence[float]) -> GroupResult:
        group = make_group(task_id, rewards)
        for episode in group.episodes:
            for row in episode.rows:
                row.logprobs[row.loss_mask] += np.float32(1e-5)
        return group

    monkeypatch.setattr(fleet_of_groups, "make_group", compute_otherwise)
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--regenerate"]) == 0
    told = capsys.readouterr().out
    assert "0 of 4 steps bit-equal\n" in told
    assert "actor.recompute_logprob=False trains on the engine's log-probs" in told
    assert "4 of 4 steps within the tolerance" in told


@pytest.mark.slow
def test_a_run_whose_settings_have_changed_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = train()
    edit(
        run_dir,
        "INSERT INTO sessions (began, first_step, machine) "
        "SELECT began, 3, json_set(machine, '$.settings', 'others') FROM sessions",
    )
    assert main(["replay", str(run_dir), "--regenerate"]) == 2
    assert "cannot be sampled again: its settings were others up to step 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_objects_is_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", make_engine())
    config = ppo_config(tmp_path, model, rollout=RolloutConfig(max_head_offpolicyness=0))
    run_dir = run(config, monkeypatch).run_dir
    assert main(["replay", str(run_dir), "--regenerate"]) == 2
    assert "its tasks were given to the trainer as an object; name them in" in capsys.readouterr().err
    assert main(["replay", str(run_dir), "--regenerate", "--from", "2"]) == 2
    assert "--regenerate begins at the start" in capsys.readouterr().err
