"""Ranks compute what one process does, at every shape of the mesh, and go on from each other's checkpoints."""

import math
from pathlib import Path

import pytest
import torch
from ranks_harness import MAX_TOKENS, OPTIMIZER, opened_ranks, random_batch
from safetensors.torch import load_file

from areal.api.errors import ModelError, NonFiniteUpdate
from areal.config.training import OptimizerConfig
from areal.engine.inference.canary import LEAST_LIMIT
from areal.engine.model.published import WeightReader
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.supervised import mean_nll
from areal.trainer.canary import TOLERANCES, Canaries
from areal.utils.hf_utils import load_hf_tokenizer


@pytest.fixture(scope="session")
def model() -> Path:
    """Its embedding is tied to its head."""
    return find_model("builtin:tiny-math")


def one_process(model: Path, optimizer: OptimizerConfig = OPTIMIZER) -> TrainingEngine:
    return TrainingEngine(open_trainable(model), optimizer, total_steps=20, max_tokens_per_mb=MAX_TOKENS)


@pytest.mark.parametrize("backend", ["fsdp:d1", "fsdp:d2", "fsdp:d3", "fsdp:t2", "fsdp:d2t2"])
def test_ten_steps_give_the_weights_of_one_process(backend: str, model: Path, tmp_path: Path) -> None:
    flat = one_process(model)
    with opened_ranks(model, backend, tmp_path) as ranks:
        for step in range(10):
            batch = random_batch(step)
            before, scores = flat.logprobs(batch), torch.empty(len(batch.temperatures))
            torch.testing.assert_close(ranks.logprobs(batch), before, atol=1e-4, rtol=0)
            found = ranks.train_batch(batch, mean_nll, step, scores=scores)
            expected = flat.train_batch(batch, mean_nll, step)
            torch.testing.assert_close(scores, before, atol=1e-4, rtol=0)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert found["lr"] == expected["lr"]
        wanted = list(flat.model.named_weights())
        update = ranks.publish()
        for tensor, published in WeightReader().read(update, wanted):
            torch.testing.assert_close(published, tensor, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "fsdp:d2t2"])
def test_gradient_is_that_of_one_process(backend: str, model: Path, tmp_path: Path) -> None:
    """With so large an epsilon, AdamW subtracts the gradient itself."""
    descent = OptimizerConfig(lr=1e6, eps=1e6, beta1=0.0, beta2=0.0, warmup_steps=0, gradient_clipping=0.0)
    flat, batch = one_process(model, descent), random_batch(0)
    flat.train_batch(batch, mean_nll, 0)
    with opened_ranks(model, backend, tmp_path, optimizer=descent) as ranks:
        ranks.train_batch(batch, mean_nll, 0)
        for expected, found in WeightReader().read(ranks.publish(), flat.model.named_weights()):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert float(flat.flat_grad.norm()) > 1


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp:d2", "fsdp:d1"), ("fsdp:d1", "fsdp:d2"), ("fsdp:d2", "fsdp:d3"), ("fsdp:d2t2", "fsdp:d2")],
)
def test_checkpoint_is_resumed_at_another_number_of_ranks(before: str, after: str, model: Path, tmp_path: Path) -> None:
    directory, batch = tmp_path / "checkpoint", random_batch(7)
    directory.mkdir()
    with opened_ranks(model, before, tmp_path / "first") as ranks:
        for step in range(3):
            ranks.train_batch(random_batch(step), mean_nll, step)
        written = ranks.begin_checkpoint(directory)
        state = ranks.state()
        expected = ranks.train_batch(batch, mean_nll, 3)  # while it is written
        written()
        trained = ranks.logprobs(batch)
    with opened_ranks(model, after, tmp_path / "second") as ranks:
        ranks.load_checkpoint(directory, state)
        found = ranks.train_batch(batch, mean_nll, 3)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        torch.testing.assert_close(ranks.logprobs(batch), trained, atol=1e-4, rtol=0)


def test_one_process_goes_on_from_a_checkpoint_of_ranks(model: Path, tmp_path: Path) -> None:
    directory, batch, flat = tmp_path / "checkpoint", random_batch(7), one_process(model)
    directory.mkdir()
    with opened_ranks(model, "fsdp:d2", tmp_path / "logs") as ranks:
        for step in range(3):
            ranks.train_batch(random_batch(step), mean_nll, step)
        ranks.begin_checkpoint(directory)()
        flat.load_checkpoint(directory, ranks.state())
        expected = ranks.train_batch(batch, mean_nll, 3)
        assert flat.train_batch(batch, mean_nll, 3)["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        torch.testing.assert_close(flat.logprobs(batch), ranks.logprobs(batch), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["fsdp:d3", "fsdp:d2t2"])
def test_ranks_go_on_from_a_checkpoint_of_one_process(backend: str, model: Path, tmp_path: Path) -> None:
    directory, batch, flat = tmp_path / "checkpoint", random_batch(7), one_process(model)
    directory.mkdir()
    for step in range(3):
        flat.train_batch(random_batch(step), mean_nll, step)
    flat.begin_checkpoint(directory)
    with opened_ranks(model, backend, tmp_path / "logs") as ranks:
        ranks.load_checkpoint(directory, flat.state())
        found, expected = ranks.train_batch(batch, mean_nll, 3), flat.train_batch(batch, mean_nll, 3)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["lr"] == expected["lr"]
        torch.testing.assert_close(ranks.logprobs(batch), flat.logprobs(batch), atol=1e-4, rtol=0)


def test_checkpoint_is_a_model_that_one_process_reads(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    with opened_ranks(model, "fsdp:d2", tmp_path / "logs") as ranks:
        ranks.train_batch(random_batch(0), mean_nll, 0)
        ranks.begin_checkpoint(directory)()
        expected = ranks.logprobs(random_batch(1))
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    assert {name for path in directory.glob("model-*.safetensors") for name in load_file(path)} > {"model.norm.weight"}
    torch.testing.assert_close(one_process(directory).logprobs(random_batch(1)), expected, atol=1e-5, rtol=0)


def test_update_that_is_not_finite_changes_nothing_on_any_rank(model: Path, tmp_path: Path) -> None:
    batch = random_batch(0)
    broken = random_batch(1)
    broken.fields["weights"][0] = math.nan  # in the share of one rank
    with opened_ranks(model, "fsdp:d2", tmp_path) as ranks:
        before = ranks.logprobs(batch)
        with pytest.raises(NonFiniteUpdate, match="must be finite"):
            ranks.train_batch(broken, mean_nll, 0)
        torch.testing.assert_close(ranks.logprobs(batch), before, atol=0, rtol=0)
        assert ranks.train_batch(batch, mean_nll, 0)["loss"] > 0


def test_checkpoint_before_the_first_step_does_not_change_it(model: Path, tmp_path: Path) -> None:
    """A critic may learn alone at first, and a first update may not be finite."""
    directory, batch, flat = tmp_path / "checkpoint", random_batch(0), one_process(model)
    directory.mkdir()
    broken = random_batch(1)
    broken.fields["weights"][0] = math.nan
    flat.train_batch(batch, mean_nll, 0)
    with opened_ranks(model, "fsdp:d2", tmp_path / "logs") as ranks:
        with pytest.raises(NonFiniteUpdate):
            ranks.train_batch(broken, mean_nll, 0)
        ranks.begin_checkpoint(directory)()
        ranks.train_batch(batch, mean_nll, 0)
        torch.testing.assert_close(ranks.logprobs(batch), flat.logprobs(batch), atol=1e-4, rtol=0)
        ranks.load_checkpoint(directory, {"version": 0, "steps": 0})
        ranks.begin_checkpoint(tmp_path / "logs")()
        ranks.train_batch(batch, mean_nll, 0)
        torch.testing.assert_close(ranks.logprobs(batch), flat.logprobs(batch), atol=1e-4, rtol=0)


def test_layers_that_are_computed_again_give_the_same_gradient(model: Path, tmp_path: Path) -> None:
    flat, batch = one_process(model), random_batch(0)
    with opened_ranks(model, "fsdp:d2", tmp_path, gradient_checkpointing=True) as ranks:
        for step in range(2):
            found, expected = ranks.train_batch(batch, mean_nll, step), flat.train_batch(batch, mean_nll, step)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_error_of_one_rank_ends_the_call_of_all(model: Path, tmp_path: Path) -> None:
    batch = random_batch(0)
    batch.spans[0].images = (b"",)  # in the share of one rank; the other waits for it
    with opened_ranks(model, "fsdp:d2", tmp_path) as ranks, pytest.raises(ModelError, match="ranks train on text only"):
        ranks.train_batch(batch, mean_nll, 0)


def test_offload_needs_something_to_offload_from(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match="this rank has no GPU; leave it out"),
        opened_ranks(model, "fsdp:d2", tmp_path, offload=True),
    ):
        pass


def test_ranks_publish_in_what_engines_compute_in(model: Path, tmp_path: Path) -> None:
    flat = one_process(model)
    with opened_ranks(model, "fsdp:d2", tmp_path) as ranks:
        for tensor, published in WeightReader().read(ranks.publish("bfloat16"), flat.model.named_weights()):
            assert torch.equal(published, tensor.bfloat16())


def test_canary_is_that_of_one_process_although_some_ranks_have_no_part_of_it(model: Path, tmp_path: Path) -> None:
    canaries = Canaries(load_hf_tokenizer(model), TOLERANCES["float32"])
    alone = one_process(model)
    with opened_ranks(model, "fsdp:d3", tmp_path) as ranks:
        update = ranks.publish()
        found, expected = (canaries.attached(update, each).canary for each in (ranks, alone))
    assert found is not None
    assert expected is not None
    assert found.logprobs == pytest.approx(expected.logprobs, abs=LEAST_LIMIT / 10)
