"""A checkpoint is complete or absent, and a run that resumes from it goes on as if it had never stopped."""

import os
from pathlib import Path

import pytest
import torch
from small_runs import byte_tokenizer, make_batch, make_directory, make_engine

from areal.api.errors import ArealError
from areal.config.training import ActorConfig
from areal.engine.training.engine import TrainingEngine
from areal.trainer.checkpoint import load_checkpoint, save_checkpoint
from areal.trainer.update import PolicyUpdate

pytestmark = pytest.mark.slow


def train(engine: TrainingEngine, steps: range, *, recompute: bool = False) -> None:
    actor = ActorConfig(ppo_n_minibatches=2, recompute_logprob=recompute)
    update = PolicyUpdate(engine, actor, None, seed=1)
    for step in steps:
        update.step(make_batch(seed=step))


def engine_for_a_run() -> TrainingEngine:
    return make_engine(lr_scheduler="cosine", warmup_steps=3)


def save(directory: Path, engine: TrainingEngine, step: int) -> None:
    save_checkpoint(directory, engine, byte_tokenizer(), {"step": step})


@pytest.mark.parametrize("recompute", [False, True])
def test_two_steps_a_restart_and_two_more_are_four_steps(tmp_path: Path, recompute: bool) -> None:
    straight = engine_for_a_run()
    train(straight, range(4), recompute=recompute)
    first = engine_for_a_run()
    train(first, range(2), recompute=recompute)
    save(tmp_path / "step-000002", first, 2)
    second = make_engine(seed=9, lr_scheduler="cosine", warmup_steps=3)
    assert load_checkpoint(tmp_path / "step-000002", second) == {"step": 2}
    assert second.version == 2
    train(second, range(2, 4), recompute=recompute)
    assert torch.equal(second.flat, straight.flat)
    assert second.state()["steps"] == straight.state()["steps"] == 8


def test_killed_before_the_rename_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, engine = make_directory(tmp_path), engine_for_a_run()
    save(run.checkpoint(1), engine, 1)

    class Killed(BaseException):
        """Like the end of a process: no handler runs."""

    def die(*paths: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        with pytest.raises(Killed):
            save(run.checkpoint(2), engine, 2)
    assert run.checkpoints() == [run.checkpoint(1)]
    leftover = [path.name for path in (run.path / "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftover == [".step-000002.partial"]
    save(run.checkpoint(2), engine, 2)
    assert run.checkpoints() == [run.checkpoint(1), run.checkpoint(2)]
    assert not list((run.path / "checkpoints").glob(".*"))
    run.close()


def test_full_disk_is_one_line_and_leaves_nothing_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0\nand more")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ArealError, match=r"step-000001 cannot be written: Pytorch.* data/0; the older ones") as caught:
        save(tmp_path / "step-000001", engine_for_a_run(), 1)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    engine = engine_for_a_run()
    save(tmp_path / "one", engine, 1)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "one").iterdir()}
    save(tmp_path / "one", engine, 2)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "one").iterdir()} == before


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run, engine = make_directory(tmp_path), engine_for_a_run()
    for step in (1, 5, 10):
        save(run.checkpoint(step), engine, step)
    assert run.prune(2) == 5
    assert [path.name for path in run.checkpoints()] == ["step-000005", "step-000010"]
    run.close()


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = engine_for_a_run()
    save(tmp_path / "one", engine, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert sum(parameter.numel() for parameter in model.parameters()) == engine.flat.numel()
    assert AutoTokenizer.from_pretrained(tmp_path / "one").chat_template
