"""What the example agents share: a task with one right answer, and a calculator to find it with.

A task is `{"messages": [...], "answer": ...}`: messages as Chat Completions writes them, the last of them the user's.
An answer is right by `areal.reward.exact_match`: the last number of the text, digit for digit, or the whole text where
the expected answer is no number.
"""

from typing import Any

from areal.reward import exact_match_reward

MODEL = "default"
"""There is one model behind the proxy; it answers to any name."""
TRY_AGAIN = "That is wrong. Try again."
UNREAD_CALL = ("tool_call>", '{"')
"""Marks of a tool call too broken to be read: it arrives as text, and its numbers are arguments, not an answer."""


async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


async def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


CALCULATOR = (add, multiply)


def score(answer: str | None, data: dict[str, Any]) -> float:
    """1.0 if the answer is right, else 0.0."""
    return exact_match_reward(None, answer or "", [], [], data["answer"])


def score_tool_user(answer: str | None, data: dict[str, Any]) -> float:
    """The same where tools were at hand: a call that nobody could read is no answer."""
    return 0.0 if any(mark in (answer or "") for mark in UNREAD_CALL) else score(answer, data)


def split_messages(data: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]], str]:
    """The system text (None = there is none), what was said before, and the question, for SDKs that want them apart."""
    *earlier, last = data["messages"]
    system = [message["content"] for message in earlier if message["role"] == "system"]
    said = [message for message in earlier if message["role"] != "system"]
    return "\n\n".join(system) or None, said, last["content"]
