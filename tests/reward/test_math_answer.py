from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward import extract_answer, math_answer_reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"First 3, so \boxed{7}. Not 8.", "7"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", "0.5"),
        (r"-\frac{1}{2} is not it, \boxed{ -\dfrac{3}{4} }", "-0.75"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,000", 1000),
        ("#### $1,234.50", "1234.5"),
        ("The answer is 12. I used 2 steps.", "12"),
        ("The answer is 5 + 7 = 12.", "12"),
        (r"The answer is \frac{1}{3}.", "1/3"),
        ("**Answer:** **42**", "42"),
        ("Final answer: -$5", "-5"),
        ("so 2 and then 9", "9"),
        ("that makes 1e3", "1000"),
        ("50%", "50"),
        (r"\boxed{\text{Yes}}", "yes"),
        ("The answer is blue.", "Blue"),
        ("12", "She has 5 + 7 = 12.\n#### 12"),
        ("0.333333333", "1/3"),
    ],
)
def test_equal_final_answer_scores_one(completion: str, answer: Any) -> None:
    assert math_answer_reward("q", completion, [], [], answer=answer, other=1) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "7"),
        ("no idea", "7"),
        (r"7 \boxed{8}", "7"),
        (r"\boxed{3 4}", "34"),
        (r"\boxed{3*4}", "34"),
        ("10000001", "10000002"),
        ("0.34", "1/3"),
        ("1/0", "1"),
        (r"\boxed{", "1"),
    ],
)
def test_other_final_answer_scores_zero(completion: str, answer: Any) -> None:
    assert math_answer_reward("q", completion, [], [], answer=answer) == 0.0


def test_extraction_keeps_nested_braces_and_knows_when_there_is_none() -> None:
    assert extract_answer(r"x \boxed{\sqrt{\frac{a}{b}}} y") == r"\sqrt{\frac{a}{b}}"
    assert extract_answer("nothing here") is None


def test_numbers_too_large_to_write_out_are_compared_as_text() -> None:
    assert math_answer_reward("q", "#### 1e999999999", [], [], answer="1e999999998") == 0.0
    assert math_answer_reward("q", "9" * 100_000, [], [], answer="9") == 0.0


@given(
    st.text(alphabet=st.sampled_from("0123456789.,-+/eE$%{}\\boxedfracanswer is:=#* \n"), max_size=80), st.integers()
)
def test_any_text_scores_zero_or_one(completion: str, answer: int) -> None:
    assert math_answer_reward("q", completion, [], [], answer=answer) in (0.0, 1.0)
