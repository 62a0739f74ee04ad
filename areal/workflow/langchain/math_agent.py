"""Agents on LangChain's ChatOpenAI for tasks with one right answer: one try, and several.

`areal.workflow.math_task` says what a task is and when an answer is right.
"""

from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.extras import load
from areal.workflow.langchain.chat_model import chat_model
from areal.workflow.math_task import TRY_AGAIN, score


class MathAgent(AgentWorkflow):
    """Asks once; 1.0 if the answer is right, else 0.0."""

    def __init__(self) -> None:
        load("langchain_openai", "langchain-openai", extra="langchain")

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        answer = await chat_model(extra_kwargs).ainvoke(data["messages"])
        return score(answer.text, data)


class MultiTurnMathAgent(AgentWorkflow):
    """Says when an answer is wrong and asks again; each try has its own reward."""

    def __init__(self, max_turns: int = 2) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        load("langchain_openai", "langchain-openai", extra="langchain")

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
