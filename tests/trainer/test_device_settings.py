"""A run whose devices this machine does not have is refused before anything is made or started."""

from pathlib import Path
from typing import Any

import pytest
import torch

from areal import PPOTrainer, SFTTrainer
from areal.config.errors import ConfigError
from areal.config.experiment import PPOConfig, SFTConfig
from areal.config.rollout import GenerationHyperparameters, RolloutConfig
from areal.config.training import ActorConfig

TASKS: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "Sort 5291"}], "answer": "1259"}] * 64


def missing_devices() -> list[str]:
    cuda = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    return [cuda, *([] if torch.backends.mps.is_available() else ["mps"])]


@pytest.mark.parametrize("device", missing_devices())
@pytest.mark.parametrize("section", ["actor", "rollout"])
def test_a_device_that_is_not_there_is_refused_at_once(section: str, device: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = (
        {"actor": ActorConfig(device=device)} if section == "actor" else {"rollout": RolloutConfig(device=device)}
    )
    config = PPOConfig(output_dir=str(tmp_path), gconfig=GenerationHyperparameters(n_samples=2), **sections)
    with pytest.raises(ConfigError, match=rf"{section}\.device .* got {device}.* use (cpu|one below)"):
        PPOTrainer(config, TASKS).train(workflow="areal.workflow.openai.math_agent.MathAgent")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", missing_devices())
def test_so_is_one_for_supervised_training(device: str, tmp_path: Path) -> None:
    conversation = {"messages": [*TASKS[0]["messages"], {"role": "assistant", "content": "1259"}]}
    with pytest.raises(ConfigError, match=rf"actor\.device .* got {device}"):
        SFTTrainer(SFTConfig(output_dir=str(tmp_path), actor=ActorConfig(device=device)), [conversation])
