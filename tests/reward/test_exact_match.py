from typing import Any

import pytest

from areal.reward import exact_match_reward


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("1259", "1259", 1.0),
        ("Sorted: 1259.", "1259", 1.0),
        ("5291 becomes 1259", 1259, 1.0),
        ("1259 was 5291", "1259", 0.0),
        ("0125", "125", 0.0),
        ("0125", "0125", 1.0),
        ("3.14", "14", 0.0),
        ("5-3", "3", 1.0),
        ("it is -3", "-3", 1.0),
        ("", "7", 0.0),
        (" Paris\n", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
    ],
)
def test_completion_scores_one_only_for_exactly_the_answer(completion: str, answer: Any, expected: float) -> None:
    assert exact_match_reward("q", completion, [1], [2], answer=answer, difficulty=3) == expected
