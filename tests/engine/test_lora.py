"""Training an adapter: its gradient, what is published and saved of it, and that the model itself never changes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, write_model
from torch import Tensor
from torch.func import functional_call
from transformers_models import batch, requests, sampled, write_gemma2, write_gpt2

from areal.api.errors import ModelError
from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.model.adapter import AdapterConfig, base_digest
from areal.engine.models import max_positions, merge_adapter, open_adapted, open_runner, open_trainable, tokenizer_files
from areal.engine.training.engine import ScoringEngine, TokenBatch, TrainingEngine
from areal.engine.training.lora import AdaptedModel, WithoutAdapter, adapter_config
from areal.engine.training.packing import Span
from areal.engine.training.supervised import mean_nll

pytestmark = pytest.mark.slow

EXACT = 1e-4
"""Between log-probs of the engine and of the trainer."""
LORA = LoraConfig(rank=4, alpha=6.0)


def write_llama(directory: Path) -> Path:
    return write_model(directory, family="llama", tied_embeddings=False)


MODELS: dict[str, tuple[Callable[[Path], Path], LoraConfig]] = {
    "qwen3": (write_model, LORA),
    "llama with its head": (write_llama, LoraConfig(rank=3, targets=["q_proj", "v_proj", "down_proj", "lm_head"])),
    "gemma2 by transformers": (write_gemma2, LORA),
}


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoraConfig]:
    write, lora = MODELS[request.param]
    return write(tmp_path_factory.mktemp("models") / "model"), lora


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


def adapted(model: Path, lora: LoraConfig = LORA, **options: Any) -> AdaptedModel:
    return open_adapted(model, lora, name=str(model), seed=7, **options)


def learner(model: Path, lora: LoraConfig = LORA, **options: Any) -> TrainingEngine:
    optimizer = OptimizerConfig(lr=3e-2, warmup_steps=0, weight_decay=0.01)
    return TrainingEngine(adapted(model, lora, **options), optimizer, total_steps=10, max_tokens_per_mb=120)


def conversation(seed: int = 0) -> TokenBatch:
    """Two groups of sequences that begin alike."""
    draw = np.random.default_rng(seed)
    spans = []
    for group in range(2):
        prompt = draw.integers(5, 250, 12)
        for _ in range(3):
            ids = np.concatenate([prompt, draw.integers(5, 250, int(draw.integers(3, 20)))])
            spans.append(Span(ids, np.arange(len(prompt), len(ids)), group))
    count = sum(len(span.asked) for span in spans)
    weights = draw.random(count)
    fields = {"weights": torch.from_numpy(weights / weights.sum()).float()}
    return TokenBatch(spans, torch.full((count,), 0.8), fields)


def parameters_of(engine: TrainingEngine) -> AdaptedModel:
    assert isinstance(engine.model, AdaptedModel)
    return engine.model


def merged_gradient(model: Path, own: AdaptedModel, asked: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and its gradient of every A and B, by autograd through W + scale B A in float64, in transformers."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    leaves = {name: each.detach().double().requires_grad_() for name, each in own.named_weights()}
    before, weights = module.state_dict(), {}
    scale = own.parameters.config.scale
    for layer in own.parameters.layers:
        a, b = (leaves[f"base_model.model.{layer}.lora_{which}.weight"] for which in "AB")
        weights[f"{layer}.weight"] = before[f"{layer}.weight"] + scale * b @ a
    logprobs = []
    for span in asked.spans:
        logits = functional_call(module, weights, (torch.from_numpy(span.ids)[None],), {"use_cache": False}).logits[0]
        every = (logits / 0.8).log_softmax(-1)
        logprobs += [every[place - 1, span.ids[place]] for place in span.asked]
    loss = -(torch.stack(logprobs) * asked.fields["weights"]).sum()
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def disturb(engine: TrainingEngine, seed: int = 1) -> None:
    """So that B is not 0, without which A has no gradient."""
    with torch.no_grad():
        engine.flat += 0.1 * torch.randn(engine.flat.shape, generator=torch.Generator().manual_seed(seed))


def test_gradient_is_that_of_the_merged_weights(case: tuple[Path, LoraConfig]) -> None:
    check_gradient(*case)


def test_gradient_is_the_same_when_layers_are_computed_again(model: Path) -> None:
    check_gradient(model, LORA, gradient_checkpointing=True)


def check_gradient(model: Path, lora: LoraConfig, **options: Any) -> None:
    engine = learner(model, lora, **options)
    disturb(engine)
    expected_loss, expected = merged_gradient(model, parameters_of(engine), conversation())
    figures = engine.train_batch(conversation(), mean_nll)
    assert figures["loss"] == pytest.approx(float(expected_loss), abs=1e-5)
    found = dict(engine.model.named_views(engine.flat_grad))
    norm = torch.stack([each.square().sum() for each in expected.values()]).sum().sqrt()
    clipped = min(1.0, 1.0 / float(norm))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient * clipped, atol=1e-6, rtol=1e-4)
    engine.close()


async def test_engine_and_trainer_agree_on_every_version(case: tuple[Path, LoraConfig]) -> None:
    model, lora = case
    engine, own = EmbeddedEngine(open_runner(model)), learner(model, lora)
    reference = ScoringEngine(open_trainable(model, frozen=True))
    asked = requests(model, 6, with_images=False)
    for version in range(3):
        own.version = version
        update = own.publish()
        assert update.layout == "adapter"
        assert sum(shard.size_bytes for shard in update.shards) < 4 * len(own.flat) + 10_000
        await engine.update_weights(update)
        assert (await engine.health()).digest == update.digest
        answers = await asyncio.gather(*map(engine.agenerate, asked))
        drawn = batch(asked, answers)
        found = own.logprobs(drawn)
        torch.testing.assert_close(found, sampled(answers), atol=EXACT, rtol=0)
        apart = float((found - reference.logprobs(drawn)).abs().max())
        assert apart < EXACT if version == 0 else apart > 100 * EXACT
        own.train_batch(conversation(version), mean_nll)
        disturb(own, version)
    await engine.aclose()
    own.close()


def test_a_new_adapter_is_drawn_by_the_seed_and_changes_nothing(model: Path) -> None:
    one, same, other = (open_adapted(model, LORA, name="m", seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one.flat, same.flat)
    assert not torch.equal(one.flat, other.flat)
    for a, b in one.parameters.layers.values():
        assert not b.any()
        assert 0 < float(a.detach().abs().max()) <= a.shape[1] ** -0.5
    plain = ScoringEngine(open_trainable(model, frozen=True))
    assert torch.equal(ScoringEngine(one).logprobs(conversation()), plain.logprobs(conversation()))


def test_the_reference_is_the_model_without_its_adapter(case: tuple[Path, LoraConfig]) -> None:
    model, lora = case
    engine = learner(model, lora)
    disturb(engine)
    plain = ScoringEngine(open_trainable(model, frozen=True)).logprobs(conversation())
    without = WithoutAdapter(parameters_of(engine))
    assert torch.equal(without.logprobs(conversation()), plain)
    assert float((engine.logprobs(conversation()) - plain).abs().max()) > 0.01
    assert torch.equal(without.logprobs(conversation()), plain)


def test_training_changes_the_adapter_alone(model: Path) -> None:
    engine = learner(model)
    own = parameters_of(engine)
    before, digest = base_digest(own.base.named_weights()), engine.publish().digest
    losses = [engine.train_batch(conversation(), mean_nll)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.2
    assert base_digest(own.base.named_weights()) == before
    assert engine.publish().digest != digest
    sizes = {leaf.numel() for group in engine._optimizer.param_groups for leaf in group["params"]}
    assert sizes == {len(own.flat)}
    engine.close()


@pytest.mark.parametrize("split", [0, 2, 4])
def test_a_checkpoint_goes_on_to_the_bit(model: Path, tmp_path: Path, split: int) -> None:
    whole, first, second = learner(model), learner(model), learner(model)
    for step in range(4):
        whole.train_batch(conversation(step), mean_nll)
    for step in range(split):
        first.train_batch(conversation(step), mean_nll)
    first.begin_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path, first.state())
    for step in range(split, 4):
        second.train_batch(conversation(step), mean_nll)
    assert torch.equal(second.flat, whole.flat)
    assert second.publish().digest == whole.publish().digest
    assert not (tmp_path / "model.safetensors").exists()
    for engine in (whole, first, second):
        engine.close()


async def test_a_saved_adapter_is_opened_and_merged_into_its_model(model: Path, tmp_path: Path) -> None:
    engine = learner(model)
    disturb(engine)
    engine.save(str(tmp_path / "adapter"))
    assert tokenizer_files(tmp_path / "adapter") == model
    assert max_positions(tmp_path / "adapter") == max_positions(model)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    plain = ScoringEngine(open_trainable(tmp_path / "merged", frozen=True))
    expected = engine.logprobs(conversation())
    torch.testing.assert_close(plain.logprobs(conversation()), expected, atol=EXACT, rtol=0)
    opened = EmbeddedEngine(open_runner(tmp_path / "adapter"), byte_tokenizer())
    asked = requests(model, 3, with_images=False)
    answers = await asyncio.gather(*map(opened.agenerate, asked))
    torch.testing.assert_close(engine.logprobs(batch(asked, answers)), sampled(answers), atol=EXACT, rtol=0)
    await opened.aclose()


def test_an_adapter_to_begin_with_is_trained_on(model: Path, tmp_path: Path) -> None:
    engine = learner(model)
    disturb(engine)
    engine.save(str(tmp_path))
    later = adapted(model, LoraConfig(rank=4, alpha=6.0, path=str(tmp_path)))
    assert torch.equal(later.flat, engine.flat)
    with pytest.raises(ModelError, match=r"settings of actor\.lora, rank 2, alpha 4 .* got rank 4, alpha 6 "):
        adapted(model, LoraConfig(rank=2, path=str(tmp_path)))


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    learner(model).save(str(tmp_path / "adapter"))
    other = write_model(tmp_path / "other", norm_eps=1e-5)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors")
    with pytest.raises(ModelError, match=r"belongs to a model with the digest .* take the model that"):
        adapted(other, LoraConfig(rank=4, alpha=6.0, path=str(tmp_path / "adapter")))


def test_an_adapter_is_not_taken_for_a_model(model: Path, tmp_path: Path) -> None:
    learner(model).save(str(tmp_path))
    with pytest.raises(ModelError, match=r"holds an adapter to .*, not a model; .*actor\.lora\.path"):
        open_trainable(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="must name the model that the adapter belongs to"):
        open_runner(tmp_path)


def test_targets_are_those_that_the_config_names_or_all_but_the_head(tmp_path: Path) -> None:
    layers = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"]
    assert adapter_config(LoraConfig(rank=2), layers, "lm_head") == AdapterConfig(2, 4.0, ("q_proj", "up_proj"))
    chosen = LoraConfig(rank=2, targets=["lm_head"])
    assert adapter_config(chosen, layers, "lm_head").target_modules == ("lm_head",)
    with pytest.raises(ModelError, match=r"targets query, which is no linear layer here; these are lm_head, q_proj"):
        adapter_config(LoraConfig(rank=2, targets=["query"]), layers, "lm_head")


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="an adapter changes linear layers, and this model has none"):
        adapted(write_gpt2(tmp_path / "gpt2"))
