"""The built-in vision model: a published architecture, a real processor, and some success to begin with."""

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from areal.api.io_struct import ModelRequest
from areal.config.rollout import GenerationHyperparameters
from areal.dataset.builtin import SHAPES, Drawing
from areal.engine.builtin.vision import tiny_vision
from areal.engine.inference.server import load_engine
from areal.trajectory.message import Image, content_of
from areal.trajectory.rendering import Renderer
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer
from areal.utils.images import decode_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first of them may have to make the model


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_vision(print)


@pytest.fixture(scope="module")
def renderer(directory: Path) -> Renderer:
    return Renderer(load_hf_tokenizer(directory), processor=load_hf_processor(directory))


def request(renderer: Renderer, drawing: Drawing, seed: int) -> ModelRequest:
    image = Image(drawing.png())
    question = drawing.as_task()["messages"][0]["content"][-1]["text"]
    text = renderer.render([{"role": "user", "content": content_of([image, question])}], None)
    g = GenerationHyperparameters(max_new_tokens=8, stop_token_ids=[renderer.tokenizer.eos_token_id], seed=seed)
    return ModelRequest(str(seed), renderer.encode(text, [image]), g, images=[image.data])


async def test_it_begins_between_knowing_nothing_and_everything(directory: Path, renderer: Renderer) -> None:
    engine = load_engine(directory)
    drawings = list(islice(SHAPES.problems("test"), 200))
    asked = [request(renderer, drawing, seed) for seed, drawing in enumerate(drawings)]
    answers = await asyncio.gather(*map(engine.agenerate, asked))
    texts = [renderer.tokenizer.decode(each.output_tokens, skip_special_tokens=True) for each in answers]
    await engine.aclose()
    assert 0.15 < sum(text == drawing.answer for text, drawing in zip(texts, drawings, strict=True)) / 200 < 0.6


def test_transformers_loads_it(directory: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    _, info = AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    processor = AutoProcessor.from_pretrained(directory)
    made = processor(text=["<image>"], images=[decode_image(next(SHAPES.problems("test")).png())], return_tensors="pt")
    assert made["pixel_values"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "zoom"}}]])
def test_its_template_takes_text_and_images_and_only_ever_appends(renderer: Renderer, tools: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]},
        {"role": "assistant", "content": "3 red"},
        {"role": "user", "content": "And how many are blue?"},
        {"role": "assistant", "content": [{"type": "text", "text": "0"}]},
    ]

    def render(count: int, **options: Any) -> str:
        return str(renderer.tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, **options))

    for count in range(1, len(messages)):
        assert render(count + 1).startswith(render(count))
        if messages[count]["role"] == "assistant":
            assert render(count + 1).startswith(render(count, add_generation_prompt=True))
    assert "user\nLook: <image><|im_end|>" in render(5)
    assert render(5).endswith("assistant\n0<|im_end|>\n")
