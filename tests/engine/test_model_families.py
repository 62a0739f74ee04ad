"""Families of models: the engine reports the log-probs that the trainer computes, after steps of the whole model and of
an adapter. docs/models.md has the table; test_transformers_agreement.py and test_lora.py have further families."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_models import VOCABULARY, WINDOW, batch, requests, sampled, save_random, trainer

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.training import LoraConfig, OptimizerConfig
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.engine import EmbeddedEngine
from areal.engine.models import open_adapted, open_runner
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.supervised import mean_nll

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
OWN = ("Llama", "Qwen2", "Qwen3")
"""That the package's decoder computes."""
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({"tie_word_embeddings": False}, "Config"),
    "Qwen2": ({"tie_word_embeddings": True}, "Config"),
    "Qwen3": ({"head_dim": 8}, "Config"),
    "Qwen3Moe": ({"head_dim": 8, **EXPERTS}, "Config"),
    "Mistral": ({"sliding_window": WINDOW}, "Config"),
    "Gemma": ({"head_dim": 8}, "Config"),
    "Gemma2": ({"head_dim": 8, "sliding_window": WINDOW}, "Config"),
    "Gemma3": ({"head_dim": 8, **LAYERS}, "TextConfig"),
    "Phi": ({}, "Config"),
    "Phi3": ({}, "Config"),
    "SmolLM3": ({"no_rope_layers": [1, 0]}, "Config"),
}


@pytest.fixture(params=FAMILIES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    options, suffix = FAMILIES[request.param]
    config = getattr(transformers, request.param + suffix)(**{**SIZES, **options})
    kind = getattr(transformers, f"{request.param}ForCausalLM")
    return save_random(tmp_path_factory.mktemp("families") / request.param, kind, config)


async def drawn(engine: EmbeddedEngine, model: Path) -> tuple[list[ModelRequest], list[ModelResponse]]:
    asked = requests(model, 6, with_images=False)
    return asked, await asyncio.gather(*map(engine.agenerate, asked))


async def difference(engine: EmbeddedEngine, own: TrainingEngine, model: Path) -> float:
    asked, answers = await drawn(engine, model)
    return float((own.logprobs(batch(asked, answers)) - sampled(answers)).abs().max())


async def after_a_step(own: TrainingEngine, model: Path) -> tuple[float, float]:
    """How far engine and trainer are apart after a step of training, and how far that has moved the log-probs."""
    engine = EmbeddedEngine(open_runner(model))
    asked, answers = await drawn(engine, model)
    learned = batch(asked, answers)
    before = own.logprobs(learned)
    learned.fields["weights"] = torch.full((len(before),), 1 / len(before))
    own.train_batch(learned, mean_nll)
    own.version = 1
    await engine.update_weights(own.publish())
    moved = float((own.logprobs(learned) - before).abs().max())
    apart = await difference(engine, own, model)
    await engine.aclose()
    own.close()
    return apart, moved


def test_known_families_are_computed_by_the_packages_decoder(model: Path) -> None:
    assert isinstance(open_runner(model), DecoderRunner) is (model.name in OWN)


async def test_engine_and_trainer_agree_on_a_model_that_is_trained(model: Path) -> None:
    apart, moved = await after_a_step(trainer(model), model)
    assert apart < TOLERANCE
    assert moved > 100 * TOLERANCE


async def test_engine_and_trainer_agree_on_an_adapter(model: Path) -> None:
    adapted = open_adapted(model, LoraConfig(rank=2), name=str(model), seed=1)
    optimizer = OptimizerConfig(lr=3e-2, warmup_steps=0)
    apart, moved = await after_a_step(TrainingEngine(adapted, optimizer, total_steps=10), model)
    assert apart < TOLERANCE
    assert moved > 100 * TOLERANCE
