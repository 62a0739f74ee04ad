"""The final number, however it is written."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward import exact_match_reward, gsm8k_reward

SOLUTION = "She sells 16 - 7 = <<16-7=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


def reward(completion: str, answer: Any) -> float:
    return gsm8k_reward("q", completion, [1], [2], answer=answer, question="How many?")


@pytest.mark.parametrize(
    "completion",
    [
        SOLUTION,
        "#### 18",
        "####18 dollars",
        "#### $18.00",
        "#### 1 no\n#### 18",
        "#### 9 * 2 = 18",
        "So the answer is $18 per day.",
        r"\boxed{18\text{ dollars}}",
        "16 - 7 = 9, and 9 * 2 = 18",
    ],
)
def test_the_number_counts_and_not_how_it_is_written(completion: str) -> None:
    assert reward(completion, SOLUTION) == reward(completion, "18") == reward(completion, 18) == 1.0


@pytest.mark.parametrize("completion", ["", "eggs", "#### 19", "18\n#### 81", "#### -18", "#### 1.8", "#### 18,000"])
def test_another_number_or_none_scores_zero(completion: str) -> None:
    assert reward(completion, SOLUTION) == 0.0


def test_a_minus_may_be_typographic_and_a_quantity_negative() -> None:
    assert reward("#### \N{MINUS SIGN}5", "#### -5") == 1.0


def test_an_answer_without_a_number_is_never_right() -> None:
    assert reward("#### blue", "blue") == 0.0


def test_exact_match_reads_the_answer_of_a_solution_too() -> None:
    assert exact_match_reward("q", "It is 18", [], [], answer=SOLUTION) == 1.0


NUMBERS = st.integers(-(10**9), 10**9)


@given(
    number=NUMBERS,
    other=NUMBERS,
    commas=st.booleans(),
    front=st.sampled_from(["", "$", "about "]),
    back=st.sampled_from(["", ".", ".00", " eggs", "%", " km per hour"]),
    working=st.text("0123456789+-*/= $,.abc\n", max_size=40),
)
def test_any_spelling_of_a_number_is_that_number_and_no_other(
    number: int, other: int, commas: bool, front: str, back: str, working: str
) -> None:
    written = f"{number:,}" if commas else str(number)
    completion = f"{working}\n#### {front}{written}{back}"
    assert reward(completion, f"Because.\n#### {number}") == 1.0
    assert reward(completion, f"#### {other}") == float(number == other)
