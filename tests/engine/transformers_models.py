"""Directories of random transformers models, and requests that fit them."""

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn_rows import READER, with_sets
from tiny_models import byte_tokenizer

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import OptimizerConfig
from areal.dataset.builtin import SHAPES
from areal.engine.builtin.vision import write_untrained
from areal.engine.models import open_trainable
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.packing import Span
from areal.utils.hf_utils import load_hf_processor

VOCABULARY = 272
WINDOW = 8


def write_gpt2(directory: Path) -> Path:
    """Learned positions, tied embeddings, biases, no rotary: nothing like the package's own decoder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=512, n_embd=16, n_layer=2, n_head=2)
    return save_random(directory, GPT2LMHeadModel, config)


def write_gemma2(directory: Path) -> Path:
    """Every other layer attends to a window only, and logits are capped."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=WINDOW,
    )
    return save_random(directory, Gemma2ForCausalLM, config)


def write_llava(directory: Path) -> Path:
    """The built-in vision model before it has learned anything."""
    directory.mkdir(parents=True, exist_ok=True)
    write_untrained(directory)
    return directory


def write_experts(directory: Path, family: str) -> Path:
    """Files have each expert's matrices apart, transformers' modules those of a layer in one tensor."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    return save_random(directory, getattr(transformers, f"{family}ForCausalLM"), config)


WRITERS = {"gpt2": write_gpt2, "gemma2": write_gemma2, "llava": write_llava}


def save_random(directory: Path, kind: Any, config: Any) -> Path:
    config.bos_token_id = config.eos_token_id = byte_tokenizer().eos_token_id
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        module = kind(config)
        for parameter in module.parameters():  # every one matters: norms are not 1, biases not 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@cache
def drawn_images(count: int) -> list[bytes]:
    drawings = SHAPES.problems("train")
    return [next(drawings).png() for _ in range(count)]


def blank_image() -> bytes:
    from PIL import Image

    buffer = BytesIO()
    Image.new("RGB", (40, 40), (255, 255, 255)).save(buffer, format="PNG")
    return buffer.getvalue()


@cache
def image_ids(model: Path) -> list[int]:
    """The placeholders of one image."""
    processor = load_hf_processor(model)
    made = processor(text=[processor.image_token], images=[np.zeros((8, 8, 3), np.uint8)], add_special_tokens=False)
    ids: list[int] = made["input_ids"][0]
    return ids


def requests(model: Path, count: int, *, with_images: bool, **fixed: Any) -> list[ModelRequest]:
    """Prompts of many lengths, some alike; every third one has no image, every fourth has two."""
    draw = np.random.default_rng(0)
    asked = []
    for i in range(count):
        before, after = (draw.integers(10, 250, draw.integers(1, 12)).tolist() for _ in range(2))
        images = [] if not with_images or i % 3 == 2 else drawn_images(8)[i % 6 : i % 6 + (2 if i % 4 == 3 else 1)]
        ids = before + (image_ids(model) if images else []) * len(images) + after
        settings: dict[str, Any] = {"max_new_tokens": 4 + i, "seed": i, "temperature": (1.0, 0.6, 1.7)[i % 3]}
        asked.append(ModelRequest(str(i), ids, GenerationHyperparameters(**settings | fixed), images=images))
    return asked + asked[: count // 3]  # group mates


def trainer(model: Path, **options: Any) -> TrainingEngine:
    return TrainingEngine(open_trainable(model), OptimizerConfig(lr=1e-2, warmup_steps=0), total_steps=10, **options)


def batch(asked: Sequence[ModelRequest], answers: Sequence[ModelResponse], reader: ChoiceReader = READER) -> TokenBatch:
    """Every sampled token, in order."""
    spans, temperatures = [], []
    for number, (request, response) in enumerate(zip(asked, answers, strict=True)):
        ids = np.array(response.input_tokens + response.output_tokens)
        spans.append(Span(ids, np.arange(response.input_len, len(ids)), number, tuple(request.images)))
        temperatures += [request.gconfig.temperature] * response.output_len
    return with_sets(TokenBatch(spans, torch.tensor(temperatures)), answers, reader)


def sampled(answers: Sequence[ModelResponse]) -> torch.Tensor:
    return torch.tensor([logprob for response in answers for logprob in response.output_logprobs])
