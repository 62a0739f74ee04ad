"""The agents printed in docs/frameworks.md run as they are printed, and the page names agents that are there."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from calculator_task import SUM

PAGE = Path(__file__).parents[2] / "docs/frameworks.md"
LIBRARIES = {
    "AgentsSdkAgent": "agents",
    "LangChainAgent": "langchain_openai",
    "AnthropicAgent": "anthropic",
    "PydanticAgent": "pydantic_ai",
    "CamelAgent": "camel",
}


def blocks() -> dict[str, str]:
    """The page's agents: name -> source."""
    printed = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {re.search(r"class (\w+)", block).group(1): block for block in printed}  # type: ignore[union-attr]


def test_every_printed_agent_is_run_below() -> None:
    assert blocks().keys() == LIBRARIES.keys()


@pytest.mark.parametrize("name", LIBRARIES)
async def test_printed_agent_is_rewarded_for_the_right_answer(stage: Any, name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason="not installed; CAMEL has `make test-camel`")
    space: dict[str, Any] = {"__name__": "printed"}
    exec(blocks()[name], space)
    for said, reward in (("7", 1.0), ("8", 0.0)):
        async with stage(lambda prompt, said=said: said) as s:
            takes = space[name].run.__code__.co_varnames
            given = {key: value for key, value in s.kwargs().items() if key in takes or "extra_kwargs" in takes}
            got = await space[name]().run(SUM, **given)
            (node,) = s.session.tree.completions
            assert got in (reward, {node.id: reward})


def test_page_names_agents_that_are_there() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(\w+\.math_agent)\.(\w+)`(?:, `\.(\w+)`)?", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for module, *names in rows:
        assert all(hasattr(import_module(f"areal.workflow.{module}"), name) for name in names if name)
