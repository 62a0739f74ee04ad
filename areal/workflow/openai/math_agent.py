"""Three agents for tasks with one right answer: one try, several tries, and a calculator.

A task is `{"messages": [...], "answer": ...}`. An answer is right by `areal.reward.exact_match`: the last number of the
text, digit for digit, or the whole text where the expected answer is no number.
"""

import os
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from areal.api.errors import WorkflowError
from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.reward import exact_match_reward

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

MODEL = "default"
"""There is one model behind the proxy; it answers to any name."""
TRY_AGAIN = "That is wrong. Try again."
UNREAD_CALL = ("tool_call>", '{"')
"""Marks of a tool call too broken to be read: it arrives as text, and its numbers are arguments, not an answer."""


class MathAgent(AgentWorkflow):
    """Asks once; 1.0 if the answer is right, else 0.0."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        response = await _client(extra_kwargs).chat.completions.create(model=MODEL, messages=data["messages"])
        return _score(response.choices[0].message.content, data)


class MultiTurnMathAgent(AgentWorkflow):
    """Says when an answer is wrong and asks again; each try has its own reward."""

    def __init__(self, max_turns: int = 2) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        client = _client(extra_kwargs)
        messages: list[ChatCompletionMessageParam] = list(data["messages"])
        rewards: dict[str, float] = {}
        for _ in range(self.max_turns):
            response = await client.chat.completions.create(model=MODEL, messages=messages)
            answer = response.choices[0].message.content or ""
            rewards[response.id] = _score(answer, data)
            if rewards[response.id] == 1.0:
                break
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": TRY_AGAIN}]
        return rewards


class MathToolAgent(AgentWorkflow):
    """An agent of the OpenAI Agents SDK that has a calculator; 1.0 if its final answer is right, else 0.0.

    It has no instructions of its own: the task's messages say everything. What the model does wrong (no answer within
    `max_turns` calls, a tool that does not exist, a call that is no JSON) is a wrong answer, not a failed episode.
    """

    def __init__(self, max_turns: int = 4) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        self._sdk = _agents_sdk()
        self._tools = [self._sdk.function_tool(tool) for tool in (add, multiply)]

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        sdk = self._sdk
        model = sdk.OpenAIChatCompletionsModel(model=MODEL, openai_client=_client(extra_kwargs))
        try:
            result = await sdk.Runner.run(
                sdk.Agent(name="calculator", model=model, tools=self._tools),
                data["messages"],
                max_turns=self.max_turns,
                # Traces would go to another company's server; without them the SDK starts no exporter thread either.
                run_config=sdk.RunConfig(tracing_disabled=True),
            )
        except (sdk.MaxTurnsExceeded, sdk.ModelBehaviorError):
            return 0.0
        answer = str(result.final_output)
        return 0.0 if any(mark in answer for mark in UNREAD_CALL) else _score(answer, data)


async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


async def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


def _client(extra_kwargs: dict[str, Any]) -> AsyncOpenAI:
    """On the shared HTTP client a new AsyncOpenAI costs next to nothing; without it, its own takes some 30 ms."""
    return AsyncOpenAI(
        base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
        api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
        http_client=extra_kwargs.get("http_client"),
        max_retries=0,
    )


def _score(answer: str | None, data: dict[str, Any]) -> float:
    return exact_match_reward(None, answer or "", [], [], data["answer"])


def _agents_sdk() -> Any:
    try:
        import agents
    except ImportError as error:
        raise WorkflowError(
            f"MathToolAgent needs the OpenAI Agents SDK ({error}); pip install areal[agents]"
        ) from error
    return agents
