"""Training on pairs through the public classes, on the built-in model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal import DPOTrainer, RewardTrainer
from areal.api.errors import ConfigError, DatasetError, ModelError
from areal.config.experiment import DatasetConfig, DPOConfig, RewardConfig
from areal.config.training import EvaluatorConfig, SaverConfig
from areal.engine.reward_model import RewardModel
from areal.trainer.logs import read_metrics
from areal.trainer.preference import REFERENCE_FILE, ReferenceSums, read_pair
from areal.utils.hf_utils import load_hf_tokenizer

PAIRS = [
    {"prompt": f"Sort {number}", "chosen": "".join(sorted(str(number))), "rejected": str(number)}
    for number in range(5210, 5290)
]


def made(kind: type[Any], output_dir: Path, model: Path, steps: int = 4) -> Any:
    config = kind(
        experiment_name="pairs",
        trial_name="one",
        output_dir=str(output_dir),
        total_train_steps=steps,
        train_dataset=DatasetConfig(batch_size=8),
        evaluator=EvaluatorConfig(freq_steps=2),
        saver=SaverConfig(freq_steps=2, keep=5),
    )
    config.actor.path = str(model)
    config.actor.optimizer.warmup_steps = 0
    return config


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_dpo_run_ends_with_the_same_weights_and_asks_the_reference_once(tmp_path: Path, tiny_math: Path) -> None:
    def train(where: str) -> Any:
        with DPOTrainer(made(DPOConfig, tmp_path / where, tiny_math), PAIRS[:64], PAIRS[64:]) as trainer:
            return trainer.train()

    straight, cut = train("straight"), train("cut")
    held_out = straight.summary["held_out"]
    assert held_out["before"]["accuracy"] == 0.5
    assert held_out["after"]["loss"] < held_out["before"]["loss"] == pytest.approx(np.log(2))
    # As if the run had been killed after step 3: only the checkpoint of step 2 is there.
    (cut.run_dir / "summary.json").unlink()
    cut.model_dir.rename(tmp_path / "gone")
    asked = (cut.run_dir / REFERENCE_FILE).stat().st_mtime_ns
    resumed = train("cut")
    assert (cut.run_dir / REFERENCE_FILE).stat().st_mtime_ns == asked
    assert [row["step"] for row in read_metrics(resumed.run_dir) if "loss" in row] == [1, 2, 3, 4]
    expected, got = weights(straight.model_dir), weights(resumed.model_dir)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_reward_model_learns_to_tell_answers_apart_and_scores_them_in_batches(
    tmp_path: Path, tiny_math: Path
) -> None:
    with pytest.raises(ModelError, match="a head that gives one score"):
        RewardModel(tiny_math)
    with RewardTrainer(made(RewardConfig, tmp_path, tiny_math, steps=12), PAIRS[:64], PAIRS[64:]) as trainer:
        result = trainer.train()
    assert result.summary["held_out"]["after"]["accuracy"] > 0.9
    model = RewardModel(result.model_dir)
    conversations = [
        ([{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[name]}], None)
        for pair in PAIRS[64:]
        for name in ("chosen", "rejected")
    ]
    scores = np.array(model.scores(conversations)).reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).mean() > 0.9
    question = [{"role": "user", "content": PAIRS[-1]["prompt"]}]
    assert await model("", PAIRS[-1]["rejected"], [], [], messages=question, answer="ignored") == pytest.approx(
        scores[-1, 1], abs=1e-5
    )
    with pytest.raises(Exception, match="role"):  # the template's own words
        await model.score([{"content": "who says this?"}])
    assert load_hf_tokenizer(result.model_dir).eos_token == load_hf_tokenizer(tiny_math).eos_token


def test_pair_is_read_from_texts_messages_and_whole_conversations() -> None:
    user, right, wrong = (
        {"role": role, "content": text} for role, text in (("user", "2+2"), ("assistant", "4"), ("assistant", "5"))
    )
    expected = ([user, right], [user, wrong], 1)
    for task in (
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"messages": [user], "chosen": [right], "rejected": [wrong]},
        {"chosen": [user, right], "rejected": [user, wrong]},
        {"prompt": "2+2", "chosen": [user, right], "rejected": [user, wrong]},
    ):
        pair = read_pair(task, 0)
        assert (pair.chosen, pair.rejected, pair.shared) == expected
    assert read_pair({"prompt": "2+2", "chosen": "4", "rejected": ""}, 0).rejected[-1]["content"] == ""


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({"prompt": "2+2", "chosen": "4"}, "pair 3 has no rejected"),
        ({"prompt": "2+2", "chosen": "4", "rejected": "4"}, "has the same answer twice"),
        ({"chosen": "4", "rejected": "5"}, "has no prompt"),
        ({"chosen": [{"role": "user", "content": "2+2"}], "rejected": "5"}, "its chosen answer ends with 'user'"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_number(task: dict[str, Any], problem: str) -> None:
    with pytest.raises(DatasetError, match=problem):
        read_pair(task, 3)


def test_sums_of_another_reference_are_not_used(tmp_path: Path) -> None:
    sums = ReferenceSums(tmp_path / REFERENCE_FILE, 3, "one")
    assert sums.missing([0, 2]) == [0, 2]
    sums.put([2], torch.tensor([[-1.0, -2.0]]))
    sums.save()
    again = ReferenceSums(tmp_path / REFERENCE_FILE, 3, "one")
    assert again.missing([0, 2]) == [0]
    assert again.of([2]).tolist() == [[-1.0, -2.0]]
    assert ReferenceSums(tmp_path / REFERENCE_FILE, 3, "other").missing([2]) == [2]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"beta": 0.0}, "beta must be > 0"),
        ({"label_smoothing": 0.5}, "label_smoothing must lie in"),
        ({"nll_weight": -1.0}, "nll_weight must be >= 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DPOConfig(**settings)
