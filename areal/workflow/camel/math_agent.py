"""A CAMEL-AI chat agent that has a calculator.

CAMEL's pinned versions clash with those of other frameworks: install it in an environment of its own.
`areal.workflow.math_task` says what a task is and when an answer is right.
"""

from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.math_task import CALCULATOR, MODEL, load, openai_client, score_tool_user, split_messages


class MathToolAgent(AgentWorkflow):
    """1.0 if its final answer is right, else 0.0.

    What the model does wrong (no answer within `max_turns` calls, a tool that does not exist, wrong arguments) is a
    wrong answer, not a failed episode.
    """

    def __init__(self, max_turns: int = 4) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        self._agents = _camel("agents")
        self._tools = [_camel("toolkits").FunctionTool(tool) for tool in CALCULATOR]

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        system, earlier, question = split_messages(data)
        agent = self._agents.ChatAgent(
            system_message=system,
            model=chat_model(extra_kwargs),
            tools=self._tools,
            max_iteration=self.max_turns,
            step_timeout=None,  # the episode has one
        )
        for message in earlier:
            agent.update_memory(*_memory(message))
        response = await agent.astep(question)
        return score_tool_user(response.msgs[0].content if response.msgs else "", data)


def chat_model(extra_kwargs: dict[str, Any], **settings: Any) -> Any:
    """CAMEL's model for what an episode is given, for asynchronous steps; `settings` go into each request."""
    client = openai_client(extra_kwargs)
    return _camel("models").OpenAICompatibleModel(
        model_type=MODEL,
        model_config_dict=settings,
        token_counter=_rough_counter(),
        async_client=client,
        client=client,  # never called: one of its own, for synchronous steps, would load certificates needlessly
    )


def _camel(module: str) -> Any:
    return load(f"camel.{module}", "CAMEL-AI", extra="camel")


def _rough_counter() -> Any:
    """CAMEL's own would download the tokenizer of another model, to guess when a conversation must be shortened."""
    base: Any = _camel("utils").BaseTokenCounter

    class RoughCounter(base):
        def count_tokens_from_messages(self, messages: list[Any]) -> int:
            return len(self.encode(str(messages)))

        def encode(self, text: str) -> list[int]:
            return list(text.encode()[::4])

        def decode(self, token_ids: list[int]) -> str:
            raise NotImplementedError("tokens are only counted here, never decoded")

    return RoughCounter()


def _memory(message: dict[str, Any]) -> tuple[Any, Any]:
    """An earlier message as CAMEL's agents remember it."""
    base_message, role = _camel("messages").BaseMessage, _camel("types").OpenAIBackendRole
    if message["role"] == "assistant":
        return base_message.make_assistant_message("Assistant", message["content"]), role.ASSISTANT
    return base_message.make_user_message("User", message["content"]), role.USER
