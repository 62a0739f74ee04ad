"""docs/datasets.md names every built-in task; tests/guides/test_page_snippets.py runs what it prints."""

import re
from pathlib import Path

from areal.dataset.builtin import TASKS

PAGE = (Path(__file__).parents[2] / "docs/datasets.md").read_text()


def test_the_table_holds_every_built_in_task() -> None:
    table = PAGE.partition("## Built-in tasks")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(TASKS)
