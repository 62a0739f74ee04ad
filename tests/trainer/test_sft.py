"""Supervised training through its public class, on the built-in model."""

import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from areal import SFTTrainer
from areal.api.errors import DatasetError, NonFiniteUpdate, RunExists
from areal.config.experiment import DatasetConfig, SFTConfig
from areal.config.training import SaverConfig
from areal.engine.training.supervised import mean_nll
from areal.trainer import sft
from areal.trainer.logs import read_metrics

pytestmark = pytest.mark.slow


def config(output_dir: Path, model: Path, steps: int = 4, **settings: Any) -> SFTConfig:
    made = SFTConfig(
        experiment_name="sft",
        trial_name="one",
        output_dir=str(output_dir),
        total_train_steps=steps,
        train_dataset=DatasetConfig(path="builtin:sums", batch_size=32),
        saver=SaverConfig(freq_steps=2, keep=5),
        **settings,
    )
    made.actor.path = str(model)
    made.actor.optimizer.warmup_steps = 0
    made.actor.optimizer.lr = 2e-3
    return made


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


@pytest.mark.timeout(300)
def test_loss_falls_and_the_model_loads_with_transformers(tmp_path: Path, tiny_math: Path) -> None:
    with SFTTrainer(config(tmp_path, tiny_math, steps=12)) as trainer:
        result = trainer.train()
    losses = [row["loss"] for row in read_metrics(result.run_dir)]
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert result.summary["loss"] == losses[-1]
    before, after = weights(tiny_math), weights(result.model_dir)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.timeout(300)
def test_resumed_training_ends_with_the_same_weights(tmp_path: Path, tiny_math: Path) -> None:
    with SFTTrainer(config(tmp_path / "straight", tiny_math)) as trainer:
        straight = trainer.train()
    with SFTTrainer(config(tmp_path / "cut", tiny_math)) as trainer:
        cut = trainer.train()
    # As if the run had been killed after step 3: only the checkpoint of step 2 is there.
    (cut.run_dir / "summary.json").unlink()
    cut.model_dir.rename(tmp_path / "gone")
    with SFTTrainer(config(tmp_path / "cut", tiny_math)) as trainer:
        resumed = trainer.train()
    assert [row["step"] for row in read_metrics(resumed.run_dir)] == [1, 2, 3, 4]
    expected, got = weights(straight.model_dir), weights(resumed.model_dir)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    with pytest.raises(RunExists), SFTTrainer(config(tmp_path / "cut", tiny_math)) as trainer:
        trainer.train()


@pytest.mark.timeout(300)
def test_ctrl_c_saves_the_step_and_the_same_run_goes_on(
    tmp_path: Path, tiny_math: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.undo()
        return mean_nll(*args)

    monkeypatch.setattr(sft, "mean_nll", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt), SFTTrainer(config(tmp_path, tiny_math)) as trainer:
        trainer.train()
    run_dir = tmp_path / "sft/one"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000001"]
    assert "stopped after step 1 of 4; everything is saved in " in capfd.readouterr().err
    with SFTTrainer(config(tmp_path, tiny_math)) as trainer:
        trainer.train()
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3, 4]
    assert "(resuming after step 1)" in capfd.readouterr().err


def nan_at(step: int) -> Any:
    """A loss that is not a number, once."""
    calls = itertools.count(1)

    def loss(logprobs: torch.Tensor, fields: dict[str, torch.Tensor]) -> Any:
        value, figures = mean_nll(logprobs, fields)
        return value * (math.nan if next(calls) == step else 1.0), figures

    return loss


@pytest.mark.timeout(300)
def test_loss_that_is_not_a_number_stops_with_the_last_good_weights_saved(
    tmp_path: Path, tiny_math: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SFTTrainer(config(tmp_path / "straight", tiny_math)) as trainer:
        straight = trainer.train()
    settings = config(tmp_path / "cut", tiny_math)
    settings.saver.freq_steps = None
    with monkeypatch.context() as patch:
        patch.setattr(sft, "mean_nll", nan_at(3))
        with pytest.raises(NonFiniteUpdate, match=r"step 3: .* got nan and nan"), SFTTrainer(settings) as trainer:
            trainer.train()
    run_dir = tmp_path / "cut/sft/one"
    assert (run_dir / "nonfinite-step-000003.npz").exists()
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert saved.name == "step-000002"
    expected, got = weights(straight.run_dir / "checkpoints/step-000002"), weights(saved)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    with SFTTrainer(settings) as trainer:  # optimizer and schedule go on from the last good step
        resumed = trainer.train()
    expected, got = weights(straight.model_dir), weights(resumed.model_dir)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.timeout(300)
def test_loss_that_is_not_a_number_is_left_out_if_the_config_says_so(
    tmp_path: Path, tiny_math: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, tiny_math)
    settings.saver.freq_steps, settings.actor.on_nonfinite = 1, "skip"
    monkeypatch.setattr(sft, "mean_nll", nan_at(3))
    with SFTTrainer(settings) as trainer:
        result = trainer.train()
    rows = read_metrics(result.run_dir)
    assert [row["skipped_updates"] for row in rows] == [0, 0, 1, 0]
    assert ["loss" in row for row in rows] == [True, True, False, True]
    before, after = (weights(result.run_dir / f"checkpoints/step-00000{step}") for step in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_conversation_without_an_answer_is_refused_by_number(tmp_path: Path, tiny_math: Path) -> None:
    tasks = [
        {"messages": [{"role": "user", "content": "1"}], "answer": "1"},
        {"messages": [{"role": "user", "content": "2"}]},
    ]
    with pytest.raises(DatasetError, match="number 1 has neither"):
        SFTTrainer(config(tmp_path, tiny_math), tasks)
