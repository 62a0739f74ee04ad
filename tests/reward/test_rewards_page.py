"""docs/rewards.md shows every shipped reward function, and what it prints about them runs."""

import re
from pathlib import Path

import pytest

import areal.reward

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()


def test_the_table_holds_every_shipped_function() -> None:
    listed = re.findall(r"^\| `(\w+_reward)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == [name for name in areal.reward.__all__ if name.endswith("_reward")]


@pytest.mark.slow
def test_the_printed_program_is_scored_as_the_page_says() -> None:
    (block,) = re.findall(
        r"^```python\n(from areal\.reward import code_reward\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
    assert "\nassert " in block
    exec(block, {})
