"""Agents on OpenAI's SDKs for tasks with one right answer: one try, several tries, and a calculator.

`areal.workflow.math_task` says what a task is and when an answer is right.
"""

from typing import TYPE_CHECKING, Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.math_task import CALCULATOR, MODEL, TRY_AGAIN, load, openai_client, score, score_tool_user

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam


class MathAgent(AgentWorkflow):
    """Asks once; 1.0 if the answer is right, else 0.0."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = openai_client(extra_kwargs)
        response = await client.chat.completions.create(model=MODEL, messages=data["messages"])
        return score(response.choices[0].message.content, data)


class MultiTurnMathAgent(AgentWorkflow):
    """Says when an answer is wrong and asks again; each try has its own reward."""

    def __init__(self, max_turns: int = 2) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        client = openai_client(extra_kwargs)
        messages: list[ChatCompletionMessageParam] = list(data["messages"])
        rewards: dict[str, float] = {}
        for _ in range(self.max_turns):
            response = await client.chat.completions.create(model=MODEL, messages=messages)
            answer = response.choices[0].message.content or ""
            rewards[response.id] = score(answer, data)
            if rewards[response.id] == 1.0:
                break
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": TRY_AGAIN}]
        return rewards


class MathToolAgent(AgentWorkflow):
    """An agent of the OpenAI Agents SDK that has a calculator; 1.0 if its final answer is right, else 0.0.

    It has no instructions of its own: the task's messages say everything. What the model does wrong (no answer within
    `max_turns` calls, a tool that does not exist, a call that is not JSON) is a wrong answer, not a failed episode.
    """

    def __init__(self, max_turns: int = 4) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        self._sdk = load("agents", "the OpenAI Agents SDK", extra="agents")
        self._tools = [self._sdk.function_tool(tool) for tool in CALCULATOR]

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        sdk = self._sdk
        try:
            result = await sdk.Runner.run(
                sdk.Agent(name="calculator", model=self._model(openai_client(extra_kwargs)), tools=self._tools),
                data["messages"],
                max_turns=self.max_turns,
                # Traces would be sent to OpenAI; without them the SDK starts no exporter thread either.
                run_config=sdk.RunConfig(tracing_disabled=True),
            )
        except (sdk.MaxTurnsExceeded, sdk.ModelBehaviorError):
            return 0.0
        return score_tool_user(str(result.final_output), data)

    def _model(self, client: "AsyncOpenAI") -> Any:
        return self._sdk.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)


class ResponsesMathToolAgent(MathToolAgent):
    """The same agent over the Responses API, which is the SDK's default."""

    def _model(self, client: "AsyncOpenAI") -> Any:
        return self._sdk.OpenAIResponsesModel(model=MODEL, openai_client=client)
