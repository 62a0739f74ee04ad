"""An agent whose tools are those of an MCP server: whatever server it starts, it asks it what tools it has.

The server is a process, so a worker starts one and all of its episodes share it. Its session must be left in the task
that entered it, as the library wants, so one task keeps it; it ends with the worker's event loop. A server that dies
fails the episodes that call it, since nothing can be learned from them, and the next episode starts another.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED
from openai import AsyncOpenAI

from areal.reward import exact_match_reward

SERVER = [sys.executable, str(Path(__file__).with_name("calculator.py"))]
START_SECONDS = 60.0
TOOL_SECONDS = 10.0


class Tools:
    """The tools of one MCP server, which runs as long as the event loop that started it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())
        self.offered: list[dict[str, Any]] = []

    @property
    def is_over(self) -> bool:
        return self._keeper.done() or self._keeper.cancelling() > 0

    async def ready(self) -> "Tools":
        await asyncio.wait_for(asyncio.shield(self._opened), START_SECONDS)
        return self

    async def call(self, name: str, arguments: str) -> str:
        """What the tool says; a call that cannot be made is answered too, so that the model can learn from it."""
        try:
            given = json.loads(arguments)
            result = await self._opened.result().call_tool(name, given, read_timeout_seconds=TOOL_SECONDS)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._keeper.cancel()
                raise
            return f"error: {error}"
        except (ValueError, RecursionError) as error:  # such as what pydantic says of arguments that are no object
            return f"error: {error}"
        return "\n".join(block.text for block in result.content if block.type == "text")

    async def _keep(self) -> None:
        command, *arguments = self._command
        try:
            async with Client(stdio_client(StdioServerParameters(command=command, args=arguments))) as client:
                self.offered = [_as_function(tool) for tool in (await client.list_tools()).tools]
                self._opened.set_result(client)
                await asyncio.get_running_loop().create_future()  # until the loop ends, which cancels this task
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(error)


class McpAgent:
    """Answers with the server's tools; 1.0 if the last number of its final answer is right, else 0.0."""

    def __init__(self, max_turns: int = 4) -> None:
        self.max_turns = max_turns
        self._tools: Tools | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        tools = await self._of_this_loop().ready()
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        messages: list[Any] = list(data["messages"])
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(model="default", messages=messages, tools=tools.offered)
            message = completion.choices[0].message
            if not message.tool_calls:
                return exact_match_reward(None, message.content or "", [], [], data["answer"])
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                said = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return 0.0

    def _of_this_loop(self) -> Tools:
        """With `rollout.agent.mode: subproc` each episode has an event loop of its own."""
        if self._tools is None or self._tools.is_over or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._tools = Tools(SERVER)
        return self._tools


def _as_function(tool: Any) -> dict[str, Any]:
    """A tool as the OpenAI Agents SDK would describe it, which is what the built-in model has seen.

    `strict` has calls sampled under their schema.
    """
    schema = tool.input_schema
    strict = set(schema.get("properties", {})) == set(schema.get("required", []))
    parameters = {**schema, "title": f"{tool.name}_args"} | ({"additionalProperties": False} if strict else {})
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}
