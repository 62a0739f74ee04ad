"""The tokenizers that the package ships are those of the built-in models' lessons.

A change of the lessons shows here: save what `make` returns to `areal/utils/builtin_tokenizers/` and raise the edition
of the model.
"""

import json
from itertools import islice
from typing import Any

import pytest

from areal.dataset.builtin import SHAPES, SHAPES_QUESTION
from areal.engine.builtin.text import TINY_COUNTDOWN, TINY_MATH
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.models import BUILTIN
from areal.utils.hf_utils import load_hf_tokenizer

pytestmark = pytest.mark.slow


def make(name: str) -> Any:
    if name == "tiny-vision":
        corpus = [json.dumps([SHAPES_QUESTION, drawing.answer]) for drawing in islice(SHAPES.problems("train"), 1000)]
        return make_tokenizer(corpus, 384, 2048, takes_images=True)
    recipe = {"tiny-math": TINY_MATH, "tiny-countdown": TINY_COUNTDOWN}[name]
    return make_tokenizer((json.dumps(lesson) for lesson in islice(recipe.lessons(recipe.seed), 2000)), 512, 8192)


@pytest.mark.parametrize("name", BUILTIN)
def test_shipped_tokenizer_is_that_of_the_lessons(name: str) -> None:
    made, shipped = make(name), load_hf_tokenizer(f"builtin:{name}")
    assert shipped.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    assert shipped.chat_template == made.chat_template
    assert (shipped.eos_token, shipped.pad_token) == (made.eos_token, made.pad_token)
    assert shipped.model_max_length == made.model_max_length
