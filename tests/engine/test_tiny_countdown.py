"""The built-in countdown model. Its example tests how well it is warmed up; here that would take too long."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from areal.dataset.builtin import COUNTDOWN, Problem, split_of
from areal.engine.builtin.text import TINY_COUNTDOWN
from areal.engine.model.architecture import read_architecture
from areal.utils.hf_utils import load_hf_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first of them may have to make the model


def test_it_is_made_as_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    said: list[str] = []
    replace(TINY_COUNTDOWN, max_steps=5).make(tmp_path, lambda text, share: said.append(f"{share:.1%} {text}"))
    tokenizer = load_hf_tokenizer(tmp_path)
    assert said == ["2.5% making builtin:tiny-countdown (once): success 0.00 (goal 0.30)"]
    assert read_architecture(tmp_path).eos_token_ids == (tokenizer.eos_token_id,)
    assert len(tokenizer.encode("3-2+4+9")) == 7


def test_any_way_to_the_target_counts_while_it_is_warmed_up() -> None:
    problem = next(COUNTDOWN.problems("valid"))
    assert TINY_COUNTDOWN.right(f"({problem.answer})", problem)
    assert not TINY_COUNTDOWN.right("", problem)


def test_lessons_use_training_problems_only() -> None:
    asked = [messages[0]["content"] for messages, _ in islice(TINY_COUNTDOWN.lessons(20), 3000)]
    assert {split_of(Problem(question, "")) for question in asked} == {"train"}
