"""docs/rewards.md shows every shipped reward function; tests/guides/test_page_snippets.py runs what it prints."""

import re
from pathlib import Path

import areal.reward

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()


def test_the_table_holds_every_shipped_function() -> None:
    listed = re.findall(r"^\| `(\w+_reward)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == [name for name in areal.reward.__all__ if name.endswith("_reward")]
