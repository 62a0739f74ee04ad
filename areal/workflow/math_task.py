"""What the example agents share: a task with one right answer, a calculator to find it with, and access to the model.

A task is `{"messages": [...], "answer": ...}`: messages as Chat Completions writes them, the last of them the user's.
An answer is right by `areal.reward.exact_match`: the last number of the text, digit for digit, or the whole text where
the expected answer is not a number.

Libraries that only some agents need are loaded when such an agent is made.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal.api.errors import WorkflowError
from areal.reward import exact_match_reward
from areal.utils.installing import missing

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MODEL = "default"
"""The proxy serves one model, which answers to any name."""
TRY_AGAIN = "That is wrong. Try again."
UNREAD_CALL = ("tool_call>", '{"')
"""Marks of a tool call too broken to be read: it arrives as text, and its numbers are arguments, not an answer."""


def score(answer: str | None, data: dict[str, Any]) -> float:
    """1.0 if the answer is right, else 0.0."""
    return exact_match_reward(None, answer or "", [], [], data["answer"])


def score_tool_user(answer: str | None, data: dict[str, Any]) -> float:
    """The same for an agent with tools: a call that could not be read is not an answer."""
    return 0.0 if any(mark in (answer or "") for mark in UNREAD_CALL) else score(answer, data)


def split_messages(data: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]], str]:
    """The system text (None = none), the messages in between and the question, for SDKs that want them apart."""
    *earlier, last = data["messages"]
    system = [message["content"] for message in earlier if message["role"] == "system"]
    between = [message for message in earlier if message["role"] != "system"]
    return "\n\n".join(system) or None, between, last["content"]


async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


async def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


CALCULATOR = (add, multiply)


def load(module: str, library: str, *, extra: str) -> Any:
    """The module; `library` is its name for people, `extra` what installs it. Raises WorkflowError."""
    try:
        return import_module(module)
    except ImportError as error:
        raise WorkflowError(missing(f"this agent needs {library}", error, extra)) from error


def openai_client(extra_kwargs: dict[str, Any]) -> "AsyncOpenAI":
    """The official client for what an episode is given; what is missing is taken from the environment.

    On the shared HTTP client a new AsyncOpenAI costs next to nothing; one of its own takes some 30 ms.
    """
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
        api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
        http_client=extra_kwargs.get("http_client"),
        max_retries=0,
    )
