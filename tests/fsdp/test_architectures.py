"""Packs computed by transformers' models give what these models compute of each sequence alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_harness import random_batch

from areal.config.parallel import Ranks
from areal.engine.sharded.model import ShardedModel
from areal.engine.training.engine import TokenBatch
from areal.engine.transformers.model import TransformersModel
from areal.engine.transformers.training import TransformersTraining

SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
WINDOW = {"sliding_window": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Mistral": WINDOW,
    "Gemma": {},
    "Gemma2": WINDOW,
    "Gemma3": WINDOW,
    "Qwen3Moe": EXPERTS,
}


@pytest.fixture(params=ARCHITECTURES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model."""
    import transformers

    name = request.param
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, name + suffix)(**SIZES, **ARCHITECTURES[name])
    torch.manual_seed(0)
    getattr(transformers, name + "ForCausalLM")(config).save_pretrained(tmp_path)
    return tmp_path


def test_packed_logprobs_are_those_of_each_sequence(directory: Path) -> None:
    batch = random_batch(3)
    alone = _logprobs(TransformersTraining(TransformersModel(directory, trainable=True)), batch)
    packed = _logprobs(ShardedModel(directory, Ranks(1, 1), torch.device("cpu")), batch)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def _logprobs(model: Any, batch: TokenBatch) -> torch.Tensor:
    out = torch.empty(len(batch.temperatures))
    with torch.no_grad():
        for part in model.passes(batch.spans, 200):
            out[part.order] = model.logprobs(part, batch.temperatures[part.order])
    return out
