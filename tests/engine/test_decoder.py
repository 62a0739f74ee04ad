"""The decoder computes what transformers computes, and what it saves transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY, training_engine
from torch import Tensor

from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.model.architecture import Architecture, RopeScaling, read_architecture
from areal.engine.model.decoder import Decoder
from areal.engine.model.weights import load_weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel")]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama 3 rotary scaling": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": (
        "qwen3",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
}
IDS = torch.arange(200) * 7 % 96


def transformers_model(family: str, settings: dict[str, Any]) -> Any:
    """A random model of transformers' own, every weight of which matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [3, 4],
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(shape | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def our_logits(directory: Path) -> Tensor:
    """Logits after the whole of IDS, and after it but its last token, by prefill and decode."""
    decoder = Decoder(read_architecture(directory))
    load_weights(decoder, directory)
    runner = DecoderRunner(decoder)
    first = runner.prefill([0], [IDS[:-1].tolist()])
    return torch.cat([first, runner.decode([int(IDS[-1])], [len(IDS) - 1])])


@pytest.mark.parametrize(("family", "settings"), FAMILIES.values(), ids=FAMILIES)
def test_logits_are_those_of_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = transformers_model(family, settings)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model)[-2:], atol=1e-5, rtol=1e-4)


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    model = transformers_model("qwen3", {})
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model)[-2:], atol=1e-5, rtol=1e-4)


def test_rotary_scaling_matters_at_the_compared_positions(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": LLAMA3_ROPE["rope_theta"]}
    logits = [logits_of(transformers_model("llama", {"rope_parameters": rope})) for rope in (plain, LLAMA3_ROPE)]
    assert (logits[0] - logits[1]).abs().max() > 0.01


def variant(**changes: Any) -> Architecture:
    from dataclasses import replace

    return replace(TINY, max_positions=256, **changes)


@pytest.mark.parametrize(
    "architecture",
    [
        variant(family="llama", tied_embeddings=False),
        variant(family="llama", attention_bias=True),
        variant(family="llama", rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
        variant(family="qwen2"),
        variant(family="qwen3", tied_embeddings=False, rope_theta=1e6),
        variant(family="qwen3", eos_token_ids=(7,)),
        variant(family="qwen3", eos_token_ids=(7, 8), attention_bias=True),
    ],
    ids=str,
)
def test_a_saved_model_is_loaded_by_transformers_and_by_us(architecture: Architecture, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    training_engine(architecture).save(str(tmp_path))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert read_architecture(tmp_path) == architecture
    torch.testing.assert_close(our_logits(tmp_path), logits_of(model.eval())[-2:], atol=1e-5, rtol=1e-4)


def test_a_saved_model_ends_its_answers_where_the_loaded_one_did(tmp_path: Path) -> None:
    transformers_model("llama", {}).save_pretrained(tmp_path / "from")
    training_engine(read_architecture(tmp_path / "from"), directory=tmp_path / "from").save(str(tmp_path / "to"))
    assert json.loads((tmp_path / "to" / "config.json").read_text())["eos_token_id"] == [3, 4]


def test_equal_and_many_prompts_fill_the_cache_as_single_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal.engine.inference import decoder_runner as module

    monkeypatch.setattr(module, "PASS_TOKENS", 12)
    decoder = training_engine().decoder
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5] * 20, [6, 7, 8], [4]]
    together = DecoderRunner(decoder)
    order = [3, 0, 5, 1, 4, 2]
    first = together.prefill(order, [prompts[row] for row in order])
    second = together.decode([9] * 6, [len(prompt) for prompt in prompts])
    for place, row in enumerate(order):
        alone = DecoderRunner(decoder)
        torch.testing.assert_close(first[place : place + 1], alone.prefill([0], [prompts[row]]), atol=1e-5, rtol=1e-4)
        expected = alone.decode([9], [len(prompts[row])])
        torch.testing.assert_close(second[row : row + 1], expected, atol=1e-5, rtol=1e-4)
