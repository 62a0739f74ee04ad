"""A run's steps, taken again from its store, lead to the same weights; what does not is named."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_of_groups import FleetOfGroups, ppo_config, run, save_model
from small_runs import make_engine

from areal.api.errors import ArealError, EngineError
from areal.api.messages import Row
from areal.cli import main as command
from areal.config.training import CriticConfig, OptimizerConfig, ReferenceConfig
from areal.store.blobs import columns_of, episodes_of, pack, unpack
from areal.store.reader import Altered
from areal.store.schema import STORE_FILE
from areal.trainer.replay import ABSOLUTE, Replay, ReplayOutcome, Taken

pytestmark = pytest.mark.slow

STEPS = 4
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_model(directory / "policy", make_engine())
    save_model(directory / "critic", make_engine(2))
    return directory


@pytest.fixture
def train(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train for four steps of two groups, with a checkpoint after each; returns the run's directory."""

    def train(staleness: int = 2, actor: dict[str, Any] | None = None, **settings: Any) -> Path:
        config = ppo_config(tmp_path, models / "policy")
        config.rollout.max_head_offpolicyness = staleness
        config.actor = replace(config.actor, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), **(actor or {}))
        return run(replace(config, **settings), monkeypatch).run_dir

    return train


def take(run_dir: Path, **options: Any) -> list[Taken]:
    with Replay(run_dir, **options) as replay:
        return list(replay.steps())


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def edit(run_dir: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(run_dir / STORE_FILE) as db:
        assert db.execute(statement, values).rowcount >= 1


def change(run_dir: Path, setting: str, value: Any) -> None:
    edit(run_dir, f"UPDATE meta SET value = json_set(value, '$.{setting}', ?) WHERE name = 'config'", value)


def alter(run_dir: Path, step: int, name: str) -> int:
    """Change the last value of a field of one group of a step by as little as can be; returns its task."""
    with sqlite3.connect(run_dir / STORE_FILE) as db:
        task_id, data = db.execute(
            "SELECT task_id, data FROM groups JOIN rows USING (task_id) WHERE step = ? ORDER BY place DESC", (step,)
        ).fetchone()
        episodes = list(episodes_of(unpack(data), Row).values())
        values = getattr(episodes[-1][-1], name)
        values[-1] = np.nextafter(values[-1], np.float32(-9)) if values.dtype.kind == "f" else values[-1] + 1
        db.execute("UPDATE rows SET data = ? WHERE task_id = ?", (pack(columns_of(episodes)), task_id))
    return int(task_id)


def kinds(models: Path) -> dict[str, dict[str, Any]]:
    critic = CriticConfig(path=str(models / "critic"), optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
    return {
        "plain": {},
        "minibatches": {"actor": {"ppo_n_minibatches": 2}},
        "decoupled": {"actor": {"use_decoupled_loss": True}},
        "recomputed": {"actor": {"recompute_logprob": True}, "staleness": 0},
        "reference": {"actor": {"kl_ctl": 0.1}, "ref": ReferenceConfig(path=str(models / "policy"))},
        "critic": {"actor": {"group_baseline": "none", "gae_lambda": 0.9, "gae_over": "episode"}, "critic": critic},
        "bfloat16": {"actor": {"dtype": "bfloat16"}},
    }


KINDS = ("plain", "minibatches", "decoupled", "recomputed", "reference", "critic", "bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_update_leads_to_the_same_bits_again(train: Train, models: Path, kind: str) -> None:
    taken = take(train(**kinds(models)[kind]))
    assert [each.step for each in taken] == [1, 2, 3, 4]
    assert len({each.digest for each in taken}) == STEPS, "nothing was trained"
    assert not [each for each in taken if each.diverges or not each.bit_equal]


@pytest.mark.parametrize("start", [1, 3])
def test_a_replay_from_a_checkpoint_leads_to_the_same_bits(train: Train, models: Path, start: int) -> None:
    taken = take(train(**kinds(models)["critic"]), start=start)
    assert [each.step for each in taken] == list(range(start + 1, STEPS + 1))
    assert all(each.bit_equal for each in taken)


def test_the_command_says_how_many_steps_are_equal_and_writes_nothing(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train()
    before = contents(run_dir)
    assert command.main(["replay", str(run_dir)]) == 0
    assert capsys.readouterr().out == "4 of 4 steps bit-equal\n"
    assert command.main(["replay", str(run_dir), "--json", "--from", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["steps"], found["bit_equal"], found["divergence"]) == ("bits", 2, 2, None)
    assert contents(run_dir) == before


@pytest.mark.parametrize("name", ["logprobs", "returns", "input_ids", "versions", "temperatures"])
def test_a_batch_that_was_altered_is_named_with_its_step_and_field(
    train: Train, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run_dir = train()
    task_id = alter(run_dir, 3, name)
    assert command.main(["replay", str(run_dir), "--until-divergence", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["taken"] == 3
    assert (found["divergence"]["step"], found["divergence"]["cause"]) == (3, "store")
    assert found["divergence"]["altered"] == [{"field": name, "task_id": task_id}]
    assert f"its stored batch was altered: {name} of task {task_id}" in found["divergence"]["text"]


def test_groups_in_another_order_are_named(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "UPDATE groups SET place = 1 - place WHERE step = 2")
    *_, last = take(run_dir)
    assert (last.step, last.altered, last.cause) == (2, [Altered("groups")], "store")


def test_a_stored_digest_that_was_altered_is_told_from_other_weights(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "UPDATE steps SET digest = 'another' WHERE step = 2")
    taken = take(run_dir)
    assert [each.step for each in taken if each.diverges] == [2]
    assert taken[1].cause == "store"
    assert "its stored digest was altered" in taken[1].describe()


def test_stored_figures_that_were_altered_are_named(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "UPDATE metrics SET figures = json_set(figures, '$.grad_norm', 0.5) WHERE step = 2")
    (diverging,) = [each for each in take(run_dir) if each.diverges]
    assert (diverging.step, diverging.cause) == (2, "figures")
    assert [(each.name, each.stored) for each in diverging.figures] == [("grad_norm", 0.5)]


def test_other_weights_after_the_stored_batch_are_named_by_their_first_tensor(train: Train) -> None:
    run_dir = train()
    change(run_dir, "actor.optimizer.lr", 0.02)
    first = take(run_dir)[0]
    assert (first.step, first.cause) == (1, "weights")
    assert first.tensor is not None
    assert first.tensor.name == "model.embed_tokens.weight"
    assert 0 < first.tensor.different <= first.tensor.values
    assert "lr" in {each.name for each in first.figures}
    shutil.rmtree(run_dir / "checkpoints/step-000001")
    assert "keeps no checkpoint of that step" in take(run_dir)[0].describe()


def test_another_model_at_the_start_is_refused_with_a_remedy(train: Train, models: Path, tmp_path: Path) -> None:
    run_dir = train()
    change(run_dir, "actor.path", str(models / "critic"))
    with pytest.raises(ArealError, match=r"has other weights than the run had .*--from 1"):
        take(run_dir)
    assert all(each.bit_equal for each in take(run_dir, start=1))


def test_another_number_of_threads_is_compared_within_a_tolerance(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train()
    assert command.main(["replay", str(run_dir), "--threads", "2"]) == 0
    shown = capsys.readouterr().out
    assert "bits need not be equal here: threads: 1, here 2" in shown


def test_a_foreign_machine_is_compared_within_a_tolerance(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "UPDATE sessions SET machine = json_set(machine, '$.cpu', 'Foreign 9000')")
    edit(run_dir, "UPDATE steps SET digest = 'as computed there'")
    edit(run_dir, "UPDATE metrics SET figures = json_set(figures, '$.loss', json_extract(figures, '$.loss') + ?)", 1e-4)
    with Replay(run_dir) as replay:
        outcome = ReplayOutcome(run_dir, replay.span)
        for each in replay.steps():
            outcome.add(each)
    assert (outcome.bit_equal, outcome.diverging) == (0, 0)
    assert outcome.as_json()["mode"] == "tolerance"
    assert outcome.weights_apart == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}
    lines = "\n".join(outcome.lines())
    assert "cpu: Foreign 9000, here " in lines
    assert f"4 of 4 steps within the tolerance: figures ± 5% ± {ABSOLUTE:g}" in lines
    assert "furthest figure: loss of step" in lines


def test_figures_within_the_tolerance_do_not_diverge_where_the_weights_are_equal_to_the_bit(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "UPDATE sessions SET machine = json_set(machine, '$.cpu', 'Foreign 9000')")
    edit(run_dir, "UPDATE metrics SET figures = json_set(figures, '$.loss', json_extract(figures, '$.loss') + 1e-9)")
    taken = take(run_dir)
    assert all(each.bit_equal and each.figures for each in taken)
    assert not [each for each in taken if each.diverges]


def test_what_is_beyond_the_tolerance_diverges_on_a_foreign_machine_too(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "UPDATE sessions SET machine = json_set(machine, '$.torch', '1.0')")
    edit(run_dir, "UPDATE steps SET digest = 'as computed there'")
    edit(run_dir, "UPDATE metrics SET figures = json_set(figures, '$.grad_norm', 9.5) WHERE step = 3")
    assert [each.step for each in take(run_dir) if each.diverges] == [3]


def test_sessions_on_other_threads_are_each_replayed_as_they_were(train: Train) -> None:
    run_dir = train()
    edit(
        run_dir,
        "INSERT INTO sessions (began, first_step, machine) "
        "SELECT began, 2, json_set(machine, '$.cpu', 'Foreign 9000') FROM sessions",
    )
    reasons = [each.other_machine for each in take(run_dir)]
    assert reasons[:2] == [(), ()]
    assert all("Foreign 9000" in each[0] for each in reasons[2:])


def test_steps_whose_tokens_are_not_kept_are_left_out_with_a_note(train: Train) -> None:
    run_dir = train()
    edit(run_dir, "DELETE FROM rows WHERE task_id IN (SELECT task_id FROM groups WHERE step <= 2)")
    with Replay(run_dir) as replay:
        assert replay.span.note == (
            "the tokens of steps up to 2 are not kept (store.keep_tokens); it begins from the checkpoint of step 2"
        )
        assert [each.bit_equal for each in replay.steps()] == [True, True]
    with pytest.raises(ArealError, match="got 1: 2, 3"):
        take(run_dir, start=1)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ArealError, match=r"steps up to 2 are not kept .* no checkpoint from there to step 3 is kept"):
        take(run_dir)


def test_tokens_that_a_run_removes_while_it_is_replayed_are_missed_in_one_line(train: Train) -> None:
    run_dir = train()
    with closing(sqlite3.connect(run_dir / STORE_FILE, isolation_level=None)) as db:
        # It goes on, as its log of changes says.
        db.execute("INSERT INTO events (at, step, kind, detail) VALUES (0, 4, 'the run', '{}')")
        with Replay(run_dir) as replay:
            steps = replay.steps()
            assert [next(steps).step, next(steps).step] == [1, 2]
            db.execute("DELETE FROM rows WHERE task_id IN (SELECT task_id FROM groups WHERE step = 3)")
            with pytest.raises(ArealError, match="the tokens of step 3 were removed since the replay began"):
                next(steps)


def test_steps_with_other_settings_than_the_last_are_left_out_with_a_note(train: Train) -> None:
    run_dir = train()
    edit(
        run_dir,
        "INSERT INTO sessions (began, first_step, machine) "
        "SELECT began, 3, json_set(machine, '$.settings', 'others') FROM sessions",
    )
    with Replay(run_dir) as replay:
        assert replay.span.note == "the settings were others up to step 3; it begins from the checkpoint of step 3"
        assert [each.bit_equal for each in replay.steps()] == [True]


def test_a_run_that_goes_on_to_a_later_end_with_a_falling_learning_rate_is_replayed_from_there(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(tmp_path, models / "policy")
    config.actor = replace(config.actor, optimizer=OptimizerConfig(lr=1e-2, lr_scheduler="cosine"))
    with pytest.raises(EngineError):
        run(config, monkeypatch, FleetOfGroups(fails_at=3))
    run_dir = run(replace(config, total_train_steps=6), monkeypatch).run_dir
    with Replay(run_dir) as replay:
        assert replay.span.note == "the settings were others up to step 3; it begins from the checkpoint of step 3"
        assert [(each.step, each.bit_equal) for each in replay.steps()] == [(4, True), (5, True), (6, True)]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArealError, match="no run store at"):
        take(tmp_path)
