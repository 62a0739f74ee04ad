"""Supervised fine-tuning on ranks."""

from pathlib import Path

import pytest

from areal.config.experiment import SFTConfig
from areal.trainer.sft import SFTTrainer

TASKS = [
    {"messages": [{"role": "user", "content": f"Sort {number}"}], "answer": "".join(sorted(str(number)))}
    for number in range(1000, 1032)
]


def final_loss(backend: str, output_dir: Path) -> float:
    config = SFTConfig(experiment_name="sft", trial_name="one", output_dir=str(output_dir), total_train_steps=3)
    config.actor.backend = backend
    config.train_dataset.batch_size = 8
    with SFTTrainer(config, TASKS) as trainer:
        loss: float = trainer.train().summary["loss"]
        return loss


def test_loss_is_that_of_one_process(tmp_path: Path) -> None:
    assert final_loss("fsdp:d2", tmp_path / "ranks") == pytest.approx(final_loss("", tmp_path / "one"), abs=1e-4)
