"""A step is the same however the batch is cut, goes on after a reload, and refuses what would ruin the weights."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TINY, randomise, training_engine
from torch import Tensor

from areal.api.errors import NonFiniteUpdate
from areal.config.training import OptimizerConfig
from areal.engine.model.published import WeightReader
from areal.engine.training import head
from areal.engine.training.engine import TokenBatch, TrainingEngine, learning_rate, sum_of_squares
from areal.engine.training.figures import Figures
from areal.engine.training.packing import PackedDecoder, Span

pytestmark = pytest.mark.slow


def batch(seed: int = 0, groups: int = 4, members: int = 3) -> TokenBatch:
    """Groups with a shared prompt, answers of different lengths."""
    draw = np.random.default_rng(seed)
    spans = []
    for number in range(groups):
        prompt = draw.integers(0, TINY.vocab_size, 6)
        for _ in range(members):
            ids = np.concatenate((prompt, draw.integers(0, TINY.vocab_size, draw.integers(2, 20))))
            spans.append(Span(ids, np.arange(6, len(ids)), number))
    total = sum(len(span.asked) for span in spans)
    advantages = torch.from_numpy(draw.normal(size=total)).float()
    return TokenBatch(spans, torch.ones(total), {"advantages": advantages, "weights": torch.full((total,), 1 / total)})


def policy_gradient(logprobs: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
    loss = -(logprobs * fields["advantages"] * fields["weights"]).sum()
    return loss, Figures(total={"tokens": len(logprobs)}, maximum={"advantage": fields["advantages"].max()})


def gradient(**options: Any) -> tuple[Tensor, dict[str, float]]:
    engine = training_engine(optimizer=OptimizerConfig(gradient_clipping=0), **options)
    figures = engine.train_batch(batch(), policy_gradient)
    return engine.flat_grad.clone(), figures


@pytest.mark.parametrize("max_tokens_per_mb", [1, 23, 100])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(max_tokens_per_mb: int) -> None:
    whole, figures = gradient()
    parts, cut_figures = gradient(max_tokens_per_mb=max_tokens_per_mb)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    for name in ("loss", "tokens", "grad_norm", "advantage"):
        assert cut_figures[name] == pytest.approx(figures[name], abs=1e-5)
    assert figures["forward_tokens"] <= cut_figures["forward_tokens"]


@pytest.mark.parametrize("max_tokens_per_mb", [23, 16384])
def test_scores_are_those_of_the_weights_before_the_step(max_tokens_per_mb: int) -> None:
    engine, task = training_engine(max_tokens_per_mb=max_tokens_per_mb), batch()
    before, scores = engine.logprobs(task), torch.empty(len(task.temperatures))
    engine.train_batch(task, policy_gradient, scores=scores)
    torch.testing.assert_close(scores, before, atol=1e-5, rtol=0)
    assert not torch.allclose(engine.logprobs(task), before, atol=1e-3)
    with pytest.raises(NonFiniteUpdate):
        engine.train_batch(task, infinite_loss, scores=scores)
    torch.testing.assert_close(scores, before, atol=1e-5, rtol=0)


def test_layers_that_are_computed_again_have_the_same_gradient() -> None:
    whole, _ = gradient()
    engine = TrainingEngine(
        PackedDecoder(TINY, gradient_checkpointing=True), OptimizerConfig(gradient_clipping=0), total_steps=100
    )
    randomise(engine.decoder)
    engine.train_batch(batch(), policy_gradient)
    torch.testing.assert_close(engine.flat_grad, whole, atol=1e-6, rtol=0)


def test_the_gradient_does_not_depend_on_how_many_logits_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gradient()
    monkeypatch.setattr(head, "HEAD_ELEMENTS", 7 * TINY.vocab_size)
    torch.testing.assert_close(gradient()[0], whole, atol=1e-6, rtol=0)


def test_the_gradient_is_that_of_the_loss() -> None:
    engine = training_engine(optimizer=OptimizerConfig(gradient_clipping=0))
    flat, task = engine.flat.clone(), batch()
    grad, _ = gradient()

    def loss_at(weights: Tensor) -> float:
        engine.flat.copy_(weights)
        return float(policy_gradient(engine.logprobs(task).double(), task.fields)[0])

    direction = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    slope = (loss_at(flat + 1e-3 * direction) - loss_at(flat - 1e-3 * direction)) / 2e-3
    assert float(grad @ direction) == pytest.approx(slope, rel=2e-2)


def test_training_on_a_batch_makes_its_tokens_likelier() -> None:
    engine, task = training_engine(), batch()
    task.fields["advantages"] = torch.ones_like(task.fields["advantages"])
    before = engine.logprobs(task).mean()
    for _ in range(5):
        engine.train_batch(task, policy_gradient)
    assert engine.logprobs(task).mean() > before + 0.1


def test_a_long_gradient_is_shortened_to_the_limit() -> None:
    engine = training_engine(optimizer=OptimizerConfig(gradient_clipping=1e-3))
    figures = engine.train_batch(batch(), policy_gradient)
    assert figures["grad_norm"] > 1e-3
    assert float(engine.flat_grad.norm()) == pytest.approx(1e-3, rel=1e-4)


def test_weight_decay_spares_norms() -> None:
    engine = training_engine(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5, warmup_steps=0))
    before = {name: parameter.detach().clone() for name, parameter in engine.decoder.parameters.items()}
    task = batch()
    task.fields["weights"] = torch.zeros_like(task.fields["weights"])
    engine.train_batch(task, policy_gradient)
    after = engine.decoder.parameters
    torch.testing.assert_close(after["final_norm"].detach(), before["final_norm"])
    torch.testing.assert_close(after["layers.0.qkv"].detach(), before["layers.0.qkv"] * 0.95)


def infinite_loss(logprobs: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Figures]:
    """Its gradient is finite."""
    loss, figures = policy_gradient(logprobs, fields)
    return loss + math.inf, figures


def test_a_loss_or_gradient_that_is_not_finite_leaves_weights_and_optimizer_alone() -> None:
    engine = training_engine()
    engine.train_batch(batch(), policy_gradient)
    before, state, task = engine.flat.clone(), (engine.state(), engine.moments()), batch()
    task.fields["advantages"][3] = math.nan
    with pytest.raises(NonFiniteUpdate, match="gradient norm must be finite, got nan and nan; the weights were not"):
        engine.train_batch(task, policy_gradient)
    with pytest.raises(NonFiniteUpdate, match=r"gradient norm must be finite, got inf and \d"):
        engine.train_batch(batch(), infinite_loss)
    assert torch.equal(engine.flat, before)
    assert engine.state() == state[0]
    torch.testing.assert_close(vars(engine.moments()), vars(state[1]), atol=0, rtol=0)


def test_an_empty_batch_changes_nothing_but_the_place_in_the_schedule() -> None:
    engine = training_engine(optimizer=OptimizerConfig(lr=1.0, warmup_steps=4, weight_decay=0.5))
    before = engine.flat.clone()
    figures = engine.train_batch(TokenBatch([], torch.empty(0)), policy_gradient)
    assert torch.equal(engine.flat, before)
    assert figures == {"loss": 0.0, "grad_norm": 0.0, "lr": 0.25, "forward_tokens": 0.0}
    assert engine.train_batch(batch(), policy_gradient)["lr"] == 0.5
    assert engine.train_batch(batch(), policy_gradient, place=3)["lr"] == 1.0


def test_a_reloaded_engine_takes_the_same_next_step(tmp_path: Path) -> None:
    schedule = OptimizerConfig(lr=1e-2, warmup_steps=2, lr_scheduler="cosine")
    first = training_engine(optimizer=schedule)
    for step in range(3):
        first.train_batch(batch(step), policy_gradient)
    first.version = 3
    first.begin_checkpoint(tmp_path)
    second = TrainingEngine(TINY, schedule, total_steps=100)
    second.load_checkpoint(tmp_path, first.state())
    assert second.version == 3
    for engine in (first, second):
        engine.train_batch(batch(9), policy_gradient)
    assert torch.equal(first.flat, second.flat)


def test_published_weights_are_a_copy_with_their_digest_and_the_last_version_stays() -> None:
    engine = training_engine()
    old = engine.publish()
    kept = engine.flat.clone()
    engine.version = 1
    engine.train_batch(batch(), policy_gradient)
    new = engine.publish()
    assert (old.version, new.version) == (0, 1)
    assert old.digest != new.digest
    for update, weights in ((old, kept), (new, engine.flat)):
        copy = training_engine()
        for tensor, stored in WeightReader().read(update, copy.model.named_weights()):
            tensor.copy_(stored)
        assert torch.equal(copy.flat, weights)
        loaded = load_file(Path(update.path, "model.safetensors"))
        assert sum(tensor.numel() for tensor in loaded.values()) == weights.numel(), "others can read it too"
    engine.close()
    assert not Path(old.path).exists()


def test_the_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    constant = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(constant, step, 100) for step in (0, 1, 3, 50)] == [0.25, 0.5, 1.0, 1.0]
    cosine = OptimizerConfig(lr=1.0, warmup_steps=0, lr_scheduler="cosine")
    rates = [learning_rate(cosine, step, 100) for step in (0, 50, 100, 200)]
    assert rates == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_gradient_norm_of_a_large_model_loses_nothing() -> None:
    """torch's own is off by a twentieth at 100 million values, and by a quarter at 300 million."""
    values = torch.full((10_000_000,), 0.01)
    assert math.sqrt(sum_of_squares(values)) == pytest.approx(0.01 * math.sqrt(10_000_000), rel=1e-6)
    assert float(sum_of_squares(torch.empty(0))) == 0


def test_engines_in_bfloat16_get_weights_in_half_the_bytes(tmp_path: Path) -> None:
    engine, whole = training_engine(), training_engine()
    update = engine.publish("bfloat16")
    try:
        assert sum(shard.size_bytes for shard in update.shards) < 0.6 * sum(
            shard.size_bytes for shard in whole.publish().shards
        )
        for tensor, stored in WeightReader().read(update, engine.model.named_weights()):
            assert stored.dtype == torch.bfloat16
            assert torch.equal(stored, tensor.bfloat16())
    finally:
        engine.close()
        whole.close()
