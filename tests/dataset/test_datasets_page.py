"""docs/datasets.md names every built-in task, and its example runs."""

import re
from pathlib import Path

import pytest

from areal.dataset.builtin import TASKS

PAGE = (Path(__file__).parents[2] / "docs/datasets.md").read_text()


def test_the_table_holds_every_built_in_task() -> None:
    table = PAGE.partition("## Built-in tasks")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(TASKS)


def test_the_printed_example_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert "\nassert " in block
    exec(block, {})
