"""Runs that train an adapter: what they leave, that they resume and replay to the bit, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_of_groups import ppo_config, run, save_model
from safetensors.torch import load_file
from small_runs import make_engine

from areal import SFTTrainer
from areal.api.errors import ConfigError, RunExists
from areal.cli.chat import open_chat
from areal.cli.main import main
from areal.config.experiment import DatasetConfig, GRPOConfig, SFTConfig
from areal.config.rollout import RolloutConfig
from areal.config.training import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    RecoverConfig,
    ReferenceConfig,
    SaverConfig,
)
from areal.engine.model.published import WeightReader
from areal.engine.models import open_trainable
from areal.engine.training.engine import ScoringEngine
from areal.engine.training.lora import WithoutAdapter
from areal.trainer.learners import open_learner, open_reference
from areal.trainer.logs import read_metrics
from areal.trainer.replay import Replay
from areal.trainer.run import TrainResult

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=2, targets=["q_proj", "v_proj", "down_proj"])
Train = Callable[..., TrainResult]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "policy", make_engine())


@pytest.fixture
def train(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Four steps of two groups with a KL penalty, a checkpoint after each."""

    def train(place: str = "run", lora: LoraConfig = LORA, **settings: Any) -> TrainResult:
        config = ppo_config(tmp_path / place, model, ref=ReferenceConfig(path=str(model)))
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
        config.actor = replace(config.actor, optimizer=optimizer, kl_ctl=0.1, lora=lora)
        return run(replace(config, **settings), monkeypatch)

    return train


def test_a_checkpoint_is_an_adapter_that_can_be_talked_to_and_merged(train: Train, model: Path, tmp_path: Path) -> None:
    result = train()
    checkpoint = result.model_dir
    assert not (checkpoint / "config.json").exists()
    assert sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) < 20_000
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)
    names = set(load_file(checkpoint / "optimizer" / "moments.safetensors"))
    assert all("lora_" in name for name in names)
    assert open_chat(str(checkpoint)).engine is not None
    assert main(["merge", str(checkpoint), str(tmp_path / "merged")]) == 0
    merged = ScoringEngine(open_trainable(tmp_path / "merged", frozen=True))
    assert not torch.equal(merged.flat, open_trainable(model, frozen=True).flat)
    assert open_chat(str(tmp_path / "merged")).engine is not None


def test_what_cannot_be_merged_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(model), str(tmp_path / "out")]) == 2
    assert "it holds no adapter" in capsys.readouterr().err
    assert main(["merge", str(model), str(model)]) == 2
    assert "must be a new directory, it has files" in capsys.readouterr().err


@pytest.mark.parametrize("start", [None, 2])
def test_a_replay_leads_to_the_same_bits(train: Train, start: int | None) -> None:
    with Replay(train().run_dir, start=start) as replay:
        taken = list(replay.steps())
    assert [each.step for each in taken] == [1, 2, 3, 4][start or 0 :]
    assert all(each.bit_equal for each in taken)
    assert len({each.digest for each in taken}) == len(taken), "nothing was trained"


def test_a_run_that_was_cut_ends_with_the_same_adapter(train: Train) -> None:
    straight, cut = train(), train("cut")
    (cut.run_dir / "summary.json").unlink()
    for step in (3, 4):
        directory = cut.run_dir / "checkpoints" / f"step-{step:06}"
        directory.rename(cut.run_dir / f"gone-{step}")
    resumed = train("cut")
    one, other = (load_file(each.model_dir / "adapter_model.safetensors") for each in (straight, resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_does_not_go_on_with_another_adapter(train: Train) -> None:
    result = train()
    (result.run_dir / "summary.json").unlink()
    result.model_dir.rename(result.run_dir / "gone")
    with pytest.raises(RunExists, match=r"cannot go on as it began: actor\.lora was \[2, 4\.0, 'q_proj'"):
        train(lora=LoraConfig(rank=3))
    with pytest.raises(RunExists, match=r"actor\.lora was .*, is None"):
        train(lora=LoraConfig())
    train(recover=RecoverConfig(mode="force"))


def test_the_reference_of_an_adapter_is_its_own_model(model: Path, tmp_path: Path) -> None:
    config = ppo_config(tmp_path, model, ref=ReferenceConfig(path=str(model)))
    config.actor = replace(config.actor, kl_ctl=0.1, lora=LORA)
    engine = open_learner(config, model, 1, None)
    assert isinstance(open_reference(config, engine), WithoutAdapter)
    other = save_model(tmp_path / "other", make_engine(2))
    assert type(open_reference(replace(config, ref=ReferenceConfig(path=str(other))), engine)) is ScoringEngine
    update = engine.publish("bfloat16")
    tensors, _ = WeightReader().open(update)
    assert {each.dtype for each in tensors.values()} == {torch.float32}
    engine.close()


def test_a_critic_beside_an_adapter_is_trained_whole(train: Train, model: Path) -> None:
    critic = CriticConfig(path=str(model), optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
    actor = ActorConfig(path=str(model), group_baseline="none", lora=LORA)
    result = train(actor=actor, critic=critic)
    assert (result.model_dir / "critic" / "model.safetensors").exists()
    assert (result.model_dir / "adapter_model.safetensors").exists()


def test_supervised_training_of_an_adapter_lowers_the_loss(tmp_path: Path, tiny_math: Path) -> None:
    config = SFTConfig(
        output_dir=str(tmp_path),
        total_train_steps=12,
        train_dataset=DatasetConfig(path="builtin:sums", batch_size=32),
        saver=SaverConfig(freq_steps=None),
    )
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    config.actor = ActorConfig(path=str(tiny_math), optimizer=optimizer, lora=LoraConfig(rank=4))
    with SFTTrainer(config) as trainer:
        result = trainer.train()
    losses = [row["loss"] for row in read_metrics(result.run_dir)]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert (result.model_dir / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rank": 0}, "rank must be >= 1, got 0; leave it out to train the whole model"),
        ({"rank": 2, "alpha": 0.0}, "alpha must be a finite number > 0, got 0.0; leave it out for twice the rank"),
        ({"targets": ["q_proj"]}, "targets of an adapter without a rank; set rank, e.g. to 16"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LoraConfig(**settings)


@pytest.mark.parametrize(
    ("backend", "rank", "complaint"),
    [
        ("sglang", 8, "which SGLang is not given, got rollout.backend=sglang; use embedded or vllm"),
        ("vllm:d2", 513, "vLLM takes adapters of a rank up to 512, got actor.lora.rank=513"),
    ],
)
def test_engines_that_take_no_such_adapter_are_refused(backend: str, rank: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        GRPOConfig(actor=ActorConfig(lora=LoraConfig(rank=rank)), rollout=RolloutConfig(backend=backend))


def test_vllm_is_given_adapters() -> None:
    config = GRPOConfig(actor=ActorConfig(lora=LoraConfig(rank=512)), rollout=RolloutConfig(backend="vllm:d2"))
    assert config.actor.lora.rank == 512
