"""docs/frameworks.md names agents that are there; tests/guides/test_page_snippets.py plays those that it prints."""

import re
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/frameworks.md"


def test_page_names_agents_that_are_there() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(\w+\.math_agent)\.(\w+)`(?:, `\.(\w+)`)?", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for module, *names in rows:
        assert all(hasattr(import_module(f"areal.workflow.{module}"), name) for name in names if name)
