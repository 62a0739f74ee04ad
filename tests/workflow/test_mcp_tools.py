"""The example's agent with a real MCP server in a process of its own, through the real proxy."""

import asyncio
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp.server.mcpserver")  # mcp 2 has it
pytestmark = pytest.mark.slow  # the server is a process

SUM: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])
    module = import_module("examples.mcp_tools.agent")
    made = module.McpAgent()
    yield made
    if made._tools is not None:
        made._tools._keeper.cancel()
        await asyncio.wait([made._tools._keeper], timeout=30)


async def test_the_servers_tools_are_offered_and_called(stage: Any, agent: Any) -> None:
    def answer(prompt: str) -> str:
        return "It is 7." if "tool\n7<" in prompt else call("add", '{"a": 3, "b": 4}')

    async with stage(answer) as s:
        assert await agent.run(SUM, **s.kwargs()) == 1.0
        s.check_tokens()
        s.check_one_conversation(2)
        assert "Multiply two integers." in s.speaker.prompts[0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(call("subtract", '{"a": 3, "b": 4}'), "Unknown tool: subtract"), (call("add", '{"a": "three"}'), "rror")],
)
async def test_a_call_that_cannot_be_made_is_answered_with_the_reason(
    stage: Any, agent: Any, wrong: str, reason: str
) -> None:
    said = []

    def answer(prompt: str) -> str:
        said.append(prompt)
        return "I do not know." if "<|im_start|>tool" in prompt else wrong

    async with stage(answer) as s:
        assert await agent.run(SUM, **s.kwargs()) == 0.0
    assert reason in said[-1].rpartition("<|im_start|>tool")[2]


async def test_a_server_that_dies_fails_its_episode_and_the_next_starts_another(
    stage: Any, agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[type(agent).__module__]
    server = tmp_path / "dies_once.py"
    server.write_text(
        f"import os, pathlib, runpy\n"
        f"from mcp.server.mcpserver import MCPServer\n"
        f"died = pathlib.Path({str(tmp_path / 'died')!r})\n"
        f"if died.exists():\n"
        f"    runpy.run_path({module.SERVER[1]!r}, run_name='__main__')\n"
        f"server = MCPServer('calculator')\n"
        f"@server.tool(structured_output=False)\n"
        f"def add(a: int, b: int) -> str:\n"
        f"    died.touch()\n"
        f"    os._exit(1)\n"
        f"server.run()\n"
    )
    monkeypatch.setattr(module, "SERVER", [sys.executable, str(server)])

    def answer(prompt: str) -> str:
        return "It is 7." if "tool\n7<" in prompt else call("add", '{"a": 3, "b": 4}')

    async with stage(answer) as s:
        with pytest.raises(module.MCPError, match="Connection closed"):
            await agent.run(SUM, **s.kwargs())
    async with stage(answer) as s:
        assert await agent.run(SUM, **s.kwargs()) == 1.0


async def test_a_server_that_does_not_start_fails_the_episode(stage: Any, agent: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules[type(agent).__module__], "SERVER", ["/nowhere/to/be/found"])
    async with stage(lambda prompt: "7") as s:
        with pytest.raises((OSError, ExceptionGroup)):
            await agent.run(SUM, **s.kwargs())
