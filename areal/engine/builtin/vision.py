"""`builtin:tiny-vision`: a 0.3-million-parameter LLaVA that has begun to count and name coloured shapes, and no more.

A CLIP vision tower, LLaVA's projector and a Qwen3, computed by transformers, with CLIP's image processor: everything
that a large one has. Warm-up teaches the form of an answer and a part of the skill, on training images.
"""

import shutil
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.config.training import OptimizerConfig
from areal.dataset.builtin import IMAGE_SIZE, SHAPES, SHAPES_QUESTION, Drawing
from areal.engine.builtin.text import cached, progress_line, sampled_answers
from areal.engine.builtin.tokenizer import IMAGE_TOKEN
from areal.engine.model_path import Report
from areal.engine.training.engine import TokenBatch, TrainingEngine
from areal.engine.training.packing import Span
from areal.engine.training.supervised import mean_nll
from areal.engine.transformers.model import TransformersModel, no_progress_bars
from areal.engine.transformers.runner import TransformersRunner
from areal.engine.transformers.training import TransformersTraining
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer, tokenizer_directory

_EDITION = 3
"""Part of the cache's name: raise it when anything below changes the model."""
_SEED = 20
_PATCH = 8
_LESSONS = 1024
"""Training images that warm-up repeats: drawing one costs as much as learning from it."""
_BATCH = 64
_TARGET_SUCCESS = 0.35
"""Warm-up ends when this share of sampled answers on validation images is right."""
_USUAL_STEPS = 75
"""After which that is so, on most machines: an estimate to show."""
_MAX_STEPS = 400
_CHECK_STEPS = 5
_ANSWER_TOKENS = 6


def tiny_vision(report: Report) -> Path:
    """The model's directory; the model is made now if it is not cached."""
    return cached(f"tiny-vision-{_EDITION}", _make, report)


def _make(directory: Path, report: Report) -> None:
    """Make the model and write it to `directory` in Hugging Face's format."""
    write_untrained(directory)
    model = TransformersModel(directory, trainable=True)
    _warm_up(model, load_hf_processor(directory), report)
    model.save(directory)


def write_untrained(directory: Path) -> None:
    """Write the model with random weights."""
    shutil.copytree(tokenizer_directory("builtin:tiny-vision"), directory, dirs_exist_ok=True)
    tokenizer = load_hf_tokenizer(directory)
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(_SEED)
        _untrained(tokenizer).save_pretrained(directory)


def _untrained(tokenizer: Any) -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config

    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=_PATCH,
        initializer_range=0.1,
    )
    text = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def _warm_up(model: TransformersModel, processor: Any, report: Report) -> None:
    optimizer = OptimizerConfig(lr=2e-3, warmup_steps=50, beta2=0.95)
    engine = TrainingEngine(TransformersTraining(model), optimizer, total_steps=_MAX_STEPS)
    prompt = _prompt(processor)
    lessons = islice(SHAPES.problems("train", _SEED), _LESSONS)
    spans = cycle([_span(drawing, prompt, processor.tokenizer) for drawing in lessons])
    for step in range(1, _MAX_STEPS + 1):
        engine.train_batch(_batch(list(islice(spans, _BATCH))), mean_nll)
        if step % _CHECK_STEPS == 0:
            success = _success(model, prompt, processor.tokenizer)
            report(progress_line("tiny-vision", success, _TARGET_SUCCESS), step / _USUAL_STEPS)
            if success >= _TARGET_SUCCESS:
                return


def _prompt(processor: Any) -> list[int]:
    """The ids of a task's messages: the same for each, because the question and the image's size are."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": SHAPES_QUESTION}]}]
    text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    ids: list[int] = processor(text=[text], images=[image], add_special_tokens=False)["input_ids"][0]
    return ids


def _span(drawing: Drawing, prompt: list[int], tokenizer: Any) -> Span:
    answer = tokenizer(drawing.answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    ids = np.array([*prompt, *answer], dtype=np.int64)
    return Span(ids, np.arange(len(prompt), len(ids)), 0, (drawing.png(),))


def _batch(spans: list[Span]) -> TokenBatch:
    """Every token of the answers weighs the same."""
    total = sum(len(span.asked) for span in spans)
    return TokenBatch(spans, torch.ones(total), {"weights": torch.full((total,), 1.0 / total)})


def _success(model: TransformersModel, prompt: Sequence[int], tokenizer: Any, problems: int = 256) -> float:
    drawings = list(islice(SHAPES.problems("valid"), problems))
    runner = TransformersRunner(model, caches=True)
    images = [(drawing.png(),) for drawing in drawings]
    answers = sampled_answers(runner, tokenizer, [prompt] * problems, images, _ANSWER_TOKENS)
    return sum(answer == drawing.answer for answer, drawing in zip(answers, drawings, strict=True)) / problems
