"""A model with a value head: one number before each token, on every kind of model that can be trained."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TINY, training_engine
from transformers_models import write_gemma2, write_gpt2, write_llava

from areal.api.errors import ModelError
from areal.config.training import OptimizerConfig
from areal.engine.models import open_trainable
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.objective import ValueObjective
from areal.engine.training.packing import Span

pytestmark = pytest.mark.slow

LOSS = ValueObjective(None)


def write_qwen3(directory: Path) -> Path:
    """A language model of the package's own decoder."""
    training_engine(replace(TINY, tied_embeddings=False)).save(str(directory))
    return directory


WRITERS = {"qwen3": write_qwen3, "gpt2": write_gpt2, "gemma2": write_gemma2}


@pytest.fixture(params=WRITERS)
def language_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "language-model"
    directory.mkdir()
    return WRITERS[request.param](directory)


def critic(directory: Path, **options: Any) -> TrainingEngine:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=0)
    return TrainingEngine(open_trainable(directory, value_head=True), optimizer, total_steps=100, **options)


def batch(temperature: float = 1.0) -> TokenBatch:
    """Sequences of several lengths, of which two share a prefix."""
    draw = np.random.default_rng(3)
    ids = [draw.integers(10, 250, length) for length in (5, 9, 17)]
    spans = [Span(ids[0], np.array([1, 4]), 0), Span(ids[1], np.array([8]), 1), Span(ids[2], np.arange(3, 17), 2)]
    spans.append(Span(np.r_[ids[2][:6], ids[1]], np.array([6, 7]), 2))
    count = sum(len(span.asked) for span in spans)
    fields = {"weights": torch.full((count,), 1 / count), "old_values": torch.zeros(count)}
    fields["targets"] = torch.linspace(-1, 2, count)
    return TokenBatch(spans, torch.full((count,), temperature), fields)


def test_critic_that_starts_from_a_language_model_values_everything_at_0_and_learns(language_model: Path) -> None:
    engine = critic(language_model)
    assert not engine.values(batch()).any()
    losses = [engine.train_batch(batch(), LOSS)["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(float((batch().fields["targets"].square() / 2).mean()), abs=1e-6)
    assert losses[-1] < 0.2 * losses[0]


def test_values_are_what_transformers_computes_of_the_saved_critic(language_model: Path, tmp_path: Path) -> None:
    """Before each asked token, so from the hidden state of the one before it."""
    from transformers import AutoModelForSequenceClassification

    engine = critic(language_model)
    for _ in range(3):
        engine.train_batch(batch(), LOSS)
    engine.save(str(tmp_path / "saved"))
    module: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert module.num_labels == 1
    expected = []
    for span in batch().spans:
        with torch.no_grad():
            hidden = module.base_model(torch.from_numpy(span.ids)[None]).last_hidden_state[0]
            expected += module.score(hidden)[span.asked - 1, 0].tolist()
    torch.testing.assert_close(engine.values(batch()), torch.tensor(expected), atol=1e-5, rtol=0)
    assert len(set(expected)) > 1


def test_saved_critic_is_read_again_with_its_head(language_model: Path, tmp_path: Path) -> None:
    engine = critic(language_model)
    engine.train_batch(batch(), LOSS)
    directory = tmp_path / "checkpoint"
    engine.begin_checkpoint(directory)
    resumed = critic(language_model)
    resumed.load_checkpoint(directory, copy.deepcopy(engine.state()))
    for each in (engine, resumed):
        each.train_batch(batch(), LOSS)
    assert torch.equal(resumed.flat, engine.flat)


def test_neither_temperature_nor_the_cut_into_passes_changes_values(language_model: Path) -> None:
    whole, cut = critic(language_model), critic(language_model, max_tokens_per_mb=1)
    for engine in (whole, cut):
        engine.train_batch(batch(), LOSS)
        engine.train_batch(batch(), LOSS)
    torch.testing.assert_close(cut.values(batch(0.3)), whole.values(batch()), atol=1e-5, rtol=0)
    torch.testing.assert_close(cut.flat_grad, whole.flat_grad, atol=1e-5, rtol=1e-3)


def test_values_are_float32_whatever_the_rest_is_computed_in(tmp_path: Path) -> None:
    directory = write_qwen3(tmp_path)
    engine = critic(directory, dtype="bfloat16")
    for _ in range(20):
        engine.train_batch(batch(), LOSS)
    values = engine.values(batch())
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_model_of_images_cannot_be_a_critic(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a critic must be a language model .* got a llava; set critic.path to"):
        critic(write_llava(tmp_path))
