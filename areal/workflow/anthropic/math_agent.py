"""Agents on Anthropic's SDK for tasks with one right answer: one try, and a calculator.

`areal.workflow.math_task` says what a task is and when an answer is right.
"""

import os
from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.math_task import CALCULATOR, MODEL, load, score, score_tool_user, split_messages

TWO_INTEGERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"name": tool.__name__, "description": tool.__doc__, "input_schema": TWO_INTEGERS} for tool in CALCULATOR]


class MathAgent(AgentWorkflow):
    """Asks once; 1.0 if the answer is right, else 0.0."""

    def __init__(self, max_tokens: int = 256) -> None:
        """`max_tokens` = how long an answer may be; the Messages API requires it."""
        self.max_tokens = max_tokens
        self._sdk = load("anthropic", "Anthropic's SDK", extra="anthropic")

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = _client(self._sdk, extra_kwargs)
        message = await client.messages.create(model=MODEL, max_tokens=self.max_tokens, **_conversation(data))
        return score(_text(message), data)


class MathToolAgent(AgentWorkflow):
    """Has a calculator; 1.0 if its final answer is right, else 0.0.

    What the model does wrong (no answer within `max_turns` calls, a tool that does not exist, wrong arguments) is a
    wrong answer, not a failed episode.
    """

    def __init__(self, max_turns: int = 4, max_tokens: int = 256) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self._sdk = load("anthropic", "Anthropic's SDK", extra="anthropic")

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = _client(self._sdk, extra_kwargs)
        conversation = _conversation(data)
        for _ in range(self.max_turns):
            message = await client.messages.create(model=MODEL, max_tokens=self.max_tokens, tools=TOOLS, **conversation)
            if message.stop_reason != "tool_use":
                return score_tool_user(_text(message), data)
            results = [await _result(block) for block in message.content if block.type == "tool_use"]
            conversation["messages"] += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
        return 0.0


def _client(sdk: Any, extra_kwargs: dict[str, Any]) -> Any:
    """This SDK accepts a client of httpx2 only, and adds `/v1` to the base URL itself."""
    base_url = extra_kwargs.get("base_url")
    return sdk.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1") if base_url else os.getenv("ANTHROPIC_BASE_URL"),
        api_key=extra_kwargs.get("api_key") or os.getenv("ANTHROPIC_API_KEY"),
        http_client=extra_kwargs.get("httpx2_client"),
        max_retries=0,
    )


def _conversation(data: dict[str, Any]) -> dict[str, Any]:
    """The system text is a parameter of its own, left out where there is none."""
    system, earlier, question = split_messages(data)
    messages = [*earlier, {"role": "user", "content": question}]
    return {"messages": messages} if system is None else {"messages": messages, "system": system}


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def _result(call: Any) -> dict[str, Any]:
    """What a tool returned, or what was wrong with the call: the model reads either."""
    tools: dict[str, Any] = {tool.__name__: tool for tool in CALCULATOR}
    answer = {"type": "tool_result", "tool_use_id": call.id}
    if call.name not in tools:
        return {**answer, "content": f"There is no tool {call.name}.", "is_error": True}
    try:
        return {**answer, "content": await tools[call.name](**call.input)}
    except TypeError as error:
        return {**answer, "content": str(error), "is_error": True}
