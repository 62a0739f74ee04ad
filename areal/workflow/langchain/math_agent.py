"""Agents on LangChain's ChatOpenAI for tasks with one right answer: one try, and several.

`areal.workflow.math_task` says what a task is and when an answer is right.
"""

import os
from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.math_task import MODEL, TRY_AGAIN, load, score


class MathAgent(AgentWorkflow):
    """Asks once; 1.0 if the answer is right, else 0.0."""

    def __init__(self) -> None:
        _load()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        answer = await chat_model(extra_kwargs).ainvoke(data["messages"])
        return score(answer.text, data)


class MultiTurnMathAgent(AgentWorkflow):
    """Says when an answer is wrong and asks again; each try has its own reward."""

    def __init__(self, max_turns: int = 2) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        _load()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        model = chat_model(extra_kwargs)
        messages: list[Any] = list(data["messages"])
        rewards: dict[str, float] = {}
        for _ in range(self.max_turns):
            answer = await model.ainvoke(messages)
            completion = answer.response_metadata["id"]  # `answer.id` is LangChain's own
            rewards[completion] = score(answer.text, data)
            if rewards[completion] == 1.0:
                break
            messages += [answer, {"role": "user", "content": TRY_AGAIN}]
        return rewards


def chat_model(extra_kwargs: dict[str, Any]) -> Any:
    """A `ChatOpenAI` for what an episode is given, for asynchronous use; what is missing comes from the environment."""
    key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")

    # ChatOpenAI makes a synchronous client too, and loads its certificates, for every base URL, so for every episode.
    # A key that must be awaited keeps it from that.
    async def api_key() -> str:
        return key or ""

    return _load().ChatOpenAI(
        model=MODEL,
        base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
        api_key=api_key,
        http_async_client=extra_kwargs.get("http_client"),
        max_retries=0,
    )


def _load() -> Any:
    return load("langchain_openai", "langchain-openai", extra="langchain")
