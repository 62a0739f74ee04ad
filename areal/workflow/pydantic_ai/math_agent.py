"""An agent on Pydantic AI that has a calculator.

`areal.workflow.math_task` says what a task is and when an answer is right.
"""

from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.math_task import CALCULATOR, MODEL, load, openai_client, score_tool_user, split_messages


class MathToolAgent(AgentWorkflow):
    """1.0 if its final answer is right, else 0.0.

    What the model does wrong (no answer within `max_turns` calls, a tool that does not exist, wrong arguments, twice
    nothing at all) is a wrong answer, not a failed episode.
    """

    def __init__(self, max_turns: int = 4) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        self._sdk = _load("pydantic_ai")
        self._models = _load("pydantic_ai.models.openai")
        self._providers = _load("pydantic_ai.providers.openai")
        self._agent = self._sdk.Agent(tools=CALCULATOR)

    def __reduce__(self) -> Any:
        """Pydantic AI's agents cannot be pickled; this one is made again where it arrives."""
        return type(self), (self.max_turns,)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        sdk = self._sdk
        provider = self._providers.OpenAIProvider(openai_client=openai_client(extra_kwargs))
        system, earlier, question = split_messages(data)
        try:
            result = await self._agent.run(
                question,
                model=self._models.OpenAIChatModel(MODEL, provider=provider),
                instructions=system,
                message_history=[_message(sdk, message) for message in earlier],
                usage_limits=sdk.UsageLimits(request_limit=self.max_turns),
            )
        except (sdk.UsageLimitExceeded, sdk.UnexpectedModelBehavior):
            return 0.0
        return score_tool_user(result.output, data)


def _load(module: str) -> Any:
    return load(module, "Pydantic AI", extra="pydantic-ai")


def _message(sdk: Any, message: dict[str, Any]) -> Any:
    if message["role"] == "assistant":
        return sdk.ModelResponse([sdk.TextPart(message["content"])])
    return sdk.ModelRequest([sdk.UserPromptPart(message["content"])])
