"""Answers compared as mathematics, in whatever thread, and without the library an error that says what to install."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal.api.errors import WorkflowError
from areal.api.reward_api import AsyncRewardWrapper
from areal.rollout.loading import import_object

EQUAL = [
    (r"so it is \boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"),
    (r"The answer is $\frac{1}{2}$.", "0.5"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    ("#### 12", "5 + 7 = 12\n#### 12"),
    ("<think>8?</think> The answer is 1,000", "1000"),
    (r"$x = 3$", "$3$"),
]
DIFFERENT = [(r"\boxed{(x+1)^2}", "x^2+1"), ("13", "12"), ("no idea", "12"), ("", "12"), (r"\boxed{", "12")]


@pytest.mark.parametrize(("completion", "answer"), EQUAL)
def test_equal_as_mathematics_scores_one(completion: str, answer: str) -> None:
    pytest.importorskip("math_verify")
    from areal.reward import math_verify_reward

    assert math_verify_reward("q", completion, [1], [2], answer=answer, level=5) == 1.0


@pytest.mark.parametrize(("completion", "answer"), DIFFERENT)
def test_unequal_or_absent_scores_zero(completion: str, answer: str) -> None:
    pytest.importorskip("math_verify")
    from areal.reward import math_verify_reward

    assert math_verify_reward("q", completion, [1], [2], answer=answer) == 0.0


def test_it_works_in_a_thread_that_may_set_no_alarm() -> None:
    pytest.importorskip("math_verify")
    from areal.reward import math_verify_reward

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_verify_reward, "q", "$1/2$", [], [], answer="0.5").result(60) == 1.0


@pytest.mark.slow
async def test_it_works_in_a_reward_pool() -> None:
    pytest.importorskip("math_verify")
    from areal.reward import math_verify_reward

    assert await AsyncRewardWrapper(math_verify_reward, 60)("q", "$1/2$", [], [], answer="0.5") == 1.0


def test_without_the_library_its_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "areal.reward.math_verify", raising=False)
    with pytest.raises(WorkflowError, match=r"needs math-verify .*; pip install .*\[math\]'$"):
        import_object("areal.reward.math_verify_reward", "reward_fn")
