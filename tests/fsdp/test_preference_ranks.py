"""Pairs of answers and a teacher on two ranks: the steps are those of one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_harness import MAX_TOKENS, OPTIMIZER, opened_ranks
from safetensors.torch import load_file
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "trainer"))

from small_runs import make_batch

from areal import DPOTrainer, RewardTrainer
from areal.api.errors import ModelError
from areal.config.experiment import DatasetConfig, DPOConfig, GRPOConfig, RewardConfig
from areal.config.training import ActorConfig, LoraConfig, OptimizerConfig, ReferenceConfig, TeacherConfig
from areal.engine.models import find_model, open_trainable
from areal.engine.reward_model import RewardModel
from areal.trainer.learners import open_learner, policy_update
from areal.trainer.logs import read_metrics
from areal.utils.hf_utils import load_hf_tokenizer

STEPS = 3
PAIRS = [
    {"prompt": f"Sort {number}", "chosen": "".join(sorted(str(number))), "rejected": str(number)[: 1 + number % 4]}
    for number in range(5210, 5290)
]
ADAMW = OptimizerConfig(lr=1e-3, eps=1e-6, warmup_steps=0)
"""With a smaller epsilon, AdamW takes whole steps by gradients that are nothing but rounding."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says something else than the built-in one, with the same tokens."""
    directory = tmp_path_factory.mktemp("other")
    model = open_trainable(find_model("builtin:tiny-math"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in model.named_weights():
            weight += 0.02 * torch.randn(weight.shape, generator=draw)
    model.save(directory)
    load_hf_tokenizer(find_model("builtin:tiny-math")).save_pretrained(directory)
    return directory


def trained(kind: type[Any], config_kind: type[Any], output_dir: Path, backend: str, **settings: Any) -> Any:
    actor = ActorConfig(backend=backend, optimizer=ADAMW, max_tokens_per_mb=MAX_TOKENS, **settings.pop("actor", {}))
    config = config_kind(
        experiment_name="pairs",
        trial_name="one",
        output_dir=str(output_dir),
        total_train_steps=STEPS,
        train_dataset=DatasetConfig(batch_size=8),
        actor=actor,
        quiet=True,
        **settings,
    )
    with kind(config, PAIRS[:64], PAIRS[64:]) as trainer:
        return trainer.train()


def check_alike(found: Any, expected: Any) -> None:
    """The figures of every step and of what was held out, and the weights at the end."""
    rows, others = read_metrics(found.run_dir), read_metrics(expected.run_dir)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        compared = {name for name in row if "loss" in name or "margin" in name or name == "grad_norm"}
        assert compared
        for name in compared:
            assert row[name] == pytest.approx(other[name], abs=1e-5, rel=1e-3), name
    weights, others = saved(found.model_dir), saved(expected.model_dir)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-4, rtol=0)


def saved(directory: Path) -> dict[str, Tensor]:
    """Whatever number of files it is in."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_dpo_on_ranks_is_that_of_one_process(other: Path, tmp_path: Path) -> None:
    """The reference is another model, which the ranks open and drop."""
    found, expected = (
        trained(DPOTrainer, DPOConfig, tmp_path / name, backend, ref=ReferenceConfig(path=str(other)), nll_weight=0.5)
        for name, backend in (("ranks", "fsdp:d2"), ("one", ""))
    )
    check_alike(found, expected)


def test_dpo_of_an_adapter_on_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    """Of one that has learnt something before: the reference is the model without it."""
    first = trained(DPOTrainer, DPOConfig, tmp_path / "first", "", actor={"lora": LoraConfig(rank=4)})
    lora = LoraConfig(rank=4, path=str(first.model_dir))
    found, expected = (
        trained(DPOTrainer, DPOConfig, tmp_path / name, backend, actor={"lora": lora})
        for name, backend in (("ranks", "fsdp:d2"), ("one", ""))
    )
    assert set(saved(found.model_dir)) == set(saved(first.model_dir))
    check_alike(found, expected)


def test_reward_model_on_ranks_is_that_of_one_process_and_scores_answers(tmp_path: Path) -> None:
    found, expected = (
        trained(RewardTrainer, RewardConfig, tmp_path / name, backend)
        for name, backend in (("ranks", "fsdp:d2"), ("one", ""))
    )
    check_alike(found, expected)
    asked = [([{"role": "user", "content": "Sort 21"}, {"role": "assistant", "content": "12"}], None)]
    scores = [RewardModel(each.model_dir).scores(asked)[0] for each in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_teacher_and_reference_on_ranks_teach_what_they_teach_in_one_process(other: Path, tmp_path: Path) -> None:
    """An adapter is taught: its reference is the model without it, and the teacher a model of its own beside that.

    What ranks cannot compute is refused before it reaches them, and they go on.
    """
    config = GRPOConfig(
        teacher=TeacherConfig(path=str(other), with_rewards=True, discount=0.5),
        ref=ReferenceConfig(path="builtin:tiny-math"),
        actor=ActorConfig(
            optimizer=OPTIMIZER,
            max_tokens_per_mb=MAX_TOKENS,
            lora=LoraConfig(rank=4),
            kl_ctl=0.1,
            recompute_logprob=True,
            ppo_n_minibatches=2,
        ),
    )
    from transformers import ViTConfig

    model = find_model(config.actor.path)
    with opened_ranks(model, "fsdp:d2", tmp_path, lora=config.actor.lora, optimizer=OPTIMIZER) as ranks:
        ViTConfig().save_pretrained(tmp_path / "vit")
        for refused in (
            lambda: ranks.open_frozen("teacher", tmp_path / "vit"),
            lambda: ranks.open_critic(tmp_path / "vit", OPTIMIZER),
        ):
            with pytest.raises(ModelError, match=r"ranks train language models, got a vit; leave actor\.backend unset"):
                refused()
        alone = open_learner(config, model, 20, None)
        updates = [policy_update(config, each, None) for each in (ranks, alone)]
        for step in range(STEPS):
            found, expected = (update.step(make_batch(seed=step)) for update in updates)
            for name in ("loss", "grad_norm", "kl", "teacher_kl"):
                assert found.figures[name] == pytest.approx(expected.figures[name], abs=1e-5, rel=1e-3), name
            for row, other_row in zip(found.rows, expected.rows, strict=True):
                assert row.advantages == pytest.approx(other_row.advantages, abs=1e-4)
                assert row.logprobs == pytest.approx(other_row.logprobs, abs=1e-4)
        assert min(abs(expected.figures[name]) for name in ("grad_norm", "kl", "teacher_kl")) > 1e-4
