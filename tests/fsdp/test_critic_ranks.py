"""A critic on the ranks of its actor computes and learns what one in one process does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks_harness import MAX_TOKENS, OPTIMIZER, opened_ranks, random_batch
from safetensors.torch import load_file
from torch import Tensor

from areal.config.training import OptimizerConfig
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.objective import ValueObjective
from areal.trainer.ranks import RankedModel

LOSS = ValueObjective(eps_clip=0.3)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A critic whose head is not 0, so that all of it has a gradient from the first step on."""
    directory = tmp_path_factory.mktemp("critic")
    critic = open_trainable(find_model("builtin:tiny-math"), value_head=True)
    head = dict(critic.named_weights())["score.weight"]
    with torch.no_grad():
        head.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
    critic.save(directory)
    return directory


def one_process(model: Path, optimizer: OptimizerConfig = OPTIMIZER) -> TrainingEngine:
    return TrainingEngine(
        open_trainable(model, value_head=True), optimizer, total_steps=20, max_tokens_per_mb=MAX_TOKENS
    )


@contextmanager
def opened_critic(
    model: Path, backend: str, logs: Path, optimizer: OptimizerConfig = OPTIMIZER
) -> Iterator[RankedModel]:
    with opened_ranks(find_model("builtin:tiny-math"), backend, logs) as ranks:
        yield ranks.open_critic(model, optimizer)


def valued_batch(seed: int) -> TokenBatch:
    batch = random_batch(seed)
    draw = torch.Generator().manual_seed(seed)
    for name in ("targets", "old_values"):
        batch.fields[name] = torch.randn(len(batch.temperatures), generator=draw)
    return batch


def weights_of(critic: RankedModel, directory: Path) -> dict[str, Tensor]:
    directory.mkdir()
    critic.begin_checkpoint(directory)()
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("backend", ["fsdp:d1", "fsdp:d2", "fsdp:t2", "fsdp:d2t2"])
def test_ten_steps_give_the_weights_of_one_process(backend: str, model: Path, tmp_path: Path) -> None:
    flat = one_process(model)
    with opened_critic(model, backend, tmp_path / "logs") as ranks:
        for step in range(10):
            batch = valued_batch(step)
            torch.testing.assert_close(ranks.values(batch), flat.values(batch), atol=1e-4, rtol=0)
            found, expected = ranks.train_batch(batch, LOSS, step), flat.train_batch(batch, LOSS, step)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert found["clip_ratio"] == pytest.approx(expected["clip_ratio"], abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        weights = weights_of(ranks, tmp_path / "critic")
    for name, expected_tensor in flat.model.named_weights():
        torch.testing.assert_close(weights.pop(name), expected_tensor.detach(), atol=1e-4, rtol=0)
    assert not weights


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "fsdp:d2t2"])
def test_gradient_is_that_of_one_process(backend: str, model: Path, tmp_path: Path) -> None:
    """With so large an epsilon, AdamW subtracts the gradient itself."""
    descent = OptimizerConfig(lr=1e6, eps=1e6, beta1=0.0, beta2=0.0, warmup_steps=0, gradient_clipping=0.0)
    flat, batch = one_process(model, descent), valued_batch(0)
    flat.train_batch(batch, LOSS, 0)
    with opened_critic(model, backend, tmp_path / "logs", descent) as ranks:
        ranks.train_batch(batch, LOSS, 0)
        weights = weights_of(ranks, tmp_path / "critic")
    for name, expected in flat.model.named_weights():
        torch.testing.assert_close(weights[name], expected.detach(), atol=1e-5, rtol=0)
    assert float(flat.flat_grad.norm()) > 0.1


def test_critic_that_starts_from_a_language_model_values_everything_at_nothing(tmp_path: Path) -> None:
    with opened_critic(find_model("builtin:tiny-math"), "fsdp:d2", tmp_path) as critic:
        assert not critic.values(valued_batch(0)).any()
        critic.train_batch(valued_batch(0), LOSS, 0)
        assert critic.values(valued_batch(0)).any()


@pytest.mark.parametrize(("before", "after"), [("fsdp:d2", "fsdp:d1"), ("fsdp:d2t2", "fsdp:d3")])
def test_checkpoint_is_resumed_at_another_number_of_ranks(before: str, after: str, model: Path, tmp_path: Path) -> None:
    """The actor is saved at the same time, and both are trained while they are written."""
    batch, actor = valued_batch(7), tmp_path / "checkpoint"
    critic = actor / "critic"
    critic.mkdir(parents=True)
    with opened_ranks(find_model("builtin:tiny-math"), before, tmp_path / "first") as ranks:
        values = ranks.open_critic(model, OPTIMIZER)
        for step in range(3):
            values.train_batch(valued_batch(step), LOSS, step)
        written = [ranks.begin_checkpoint(actor), values.begin_checkpoint(critic)]
        state = values.state()
        expected = values.train_batch(batch, LOSS, 3)
        for wait in written:
            wait()
        trained = values.values(batch)
    with opened_critic(model, after, tmp_path / "second") as values:
        values.load_checkpoint(critic, state)
        found = values.train_batch(batch, LOSS, 3)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        torch.testing.assert_close(values.values(batch), trained, atol=1e-4, rtol=0)


def test_checkpoint_moves_between_one_process_and_ranks(model: Path, tmp_path: Path) -> None:
    flat, directory = one_process(model), tmp_path / "one-process"
    directory.mkdir()
    flat.train_batch(valued_batch(0), LOSS, 0)
    flat.begin_checkpoint(directory)
    with opened_critic(model, "fsdp:d2", tmp_path / "logs") as ranks:
        ranks.load_checkpoint(directory, flat.state())
        for each in (flat, ranks):
            each.train_batch(valued_batch(1), LOSS, 1)
        torch.testing.assert_close(ranks.values(valued_batch(2)), flat.values(valued_batch(2)), atol=1e-4, rtol=0)
        weights_of(ranks, tmp_path / "ranks")
        back = one_process(model)
        back.load_checkpoint(tmp_path / "ranks", ranks.state())
        for each in (back, ranks):
            each.train_batch(valued_batch(2), LOSS, 2)
        torch.testing.assert_close(ranks.values(valued_batch(2)), back.values(valued_batch(2)), atol=1e-4, rtol=0)
