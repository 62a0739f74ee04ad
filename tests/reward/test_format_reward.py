"""The form of a completion, whatever it says."""

import functools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward import format_reward

TAG = re.compile("</?(?:think|answer)>")
TEXT = st.text(st.sampled_from("<>/ab \n") | st.characters(), max_size=30).filter(lambda text: not TAG.search(text))


@given(thought=TEXT, said=TEXT, gap=st.text(" \n", max_size=3))
def test_any_text_may_be_between_the_tags(thought: str, said: str, gap: str) -> None:
    completion = f"{gap}<think>{thought}</think>{gap}<answer>{said}</answer>{gap}"
    assert format_reward("q", completion, [], [], answer="1") == 1.0


@given(text=TEXT)
def test_nothing_may_be_outside_of_them(text: str) -> None:
    completion = f"<think>a</think>{text}<answer>b</answer>"
    assert format_reward("q", completion, [], []) == float(not text.strip())


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "7",
        "<answer>7</answer>",
        "<answer>7</answer><think>a</think>",
        "<think>a</think><answer>7",
        "<think>a</think><answer>7</answer><answer>8</answer>",
        "<think>a<think>b</think></think><answer>7</answer>",
        "<think>" * 20_000,
    ],
)
def test_a_missing_repeated_or_misplaced_tag_scores_zero(completion: str) -> None:
    assert format_reward("q", completion, [], []) == 0.0


def test_a_prompt_may_have_opened_the_first_tag() -> None:
    assert format_reward("Think.<think>\n", "a</think><answer>7</answer>", [], []) == 1.0
    assert format_reward("Think.", "a</think><answer>7</answer>", [], []) == 0.0


def test_tags_and_pattern_can_be_chosen() -> None:
    plan = functools.partial(format_reward, tags=("plan", "code"))
    assert plan("q", "<plan>a</plan>\n<code>b</code>", [], []) == 1.0
    assert format_reward("q", "Answer: 7", [], [], pattern=r"Answer: \d+") == 1.0
    assert format_reward("q", "Answer: 7!", [], [], pattern=r"Answer: \d+") == 0.0
