from typing import Any

import pytest

from areal.reward import countdown_reward


def reward(completion: str, numbers: list[int] | None = None, target: int = 14, **task: Any) -> float:
    return countdown_reward("", completion, [], [], numbers or [2, 3, 4, 9], target, **task)


@pytest.mark.parametrize(
    "expression",
    [
        "3-2+4+9",
        "9+4+3-2",
        " 9 + 4 + (3 - 2) ",
        "(9+4+3-2)",
        "-2+3+4+9",
        "3+4-(2-9)",
        "9+4+3-2=14",
        "9+4+3-2 = 99",
        "I try 9+4.\n9+4+3-2",
        "9*4/3+2",
    ],
)
def test_every_way_to_the_target_is_right(expression: str) -> None:
    assert reward(expression, messages=[], answer="9+4+3-2") == 1.0


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("9+4+2-3", "another value"),
        ("9+3+2", "a number is missing"),
        ("9+4+3-2+9-9", "a number is used twice"),
        ("7+7", "other numbers"),
        ("9+4+3-2\nThat was easy.", "the last line is no expression"),
        ("9+4+3-2+", "an operator too many"),
        ("9+4+(3-2", "an open bracket"),
        ("9+4+3-2)", "a bracket too many"),
        ("9 4 3 2", "no operators"),
        ("94-3*2", "numbers glued together"),
        ("9**4+3-2", "no such operator"),
        ("9+4+3//2", "no such operator"),
        ("9/(4-4)+3-2", "a number twice, and division by zero"),
        ("__import__('os')", "no expression"),
        ("９+4+3-2", "digits of another script"),
        ("(" * 5000 + "9+4+3-2" + ")" * 5000, "longer than a person writes"),
        ("14", "the target itself"),
        ("", "nothing"),
    ],
)
def test_anything_else_is_wrong(expression: str, why: str) -> None:
    assert reward(expression) == 0.0, why


def test_division_is_exact_and_by_zero_wrong() -> None:
    assert reward("1/3*9", [1, 3, 9], 3) == 1.0
    assert reward("7/2", [2, 7], 3) == 0.0
    assert reward("3/(2-2)", [2, 2, 3], 3) == 0.0


def test_deepest_brackets_that_are_read_need_no_deep_stack() -> None:
    assert reward("(" * 45 + "9+4+3-2" + ")" * 45) == 1.0
    assert reward("(" * 90 + "9+4+3-2") == 0.0
    assert reward("-" * 90 + "9+4+3-2") == 1.0
