"""Clients that send an assistant's turn back in their own spelling, and a model that answers at random."""

import json
from collections.abc import Callable
from typing import Any

from chat_tokenizers import STYLES
from hypothesis import strategies as st

from areal.trajectory.parsers import AnswerFormat, ToolCall
from areal.trajectory.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
    for name in ("add", "look")
]


def as_it_is(message: Message, answers: AnswerFormat) -> Message:
    return json.loads(json.dumps(message))


def keys_in_another_order(message: Message, answers: AnswerFormat) -> Message:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(item) for item in value] if isinstance(value, list) else value

    return turned(message)


def thinking_dropped(message: Message, answers: AnswerFormat) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def thinking_in_the_content(message: Message, answers: AnswerFormat) -> Message:
    if "reasoning_content" not in message or answers.reasoning is None:
        return message
    content = answers.reasoning.render(message["reasoning_content"], message["content"])
    return {**thinking_dropped(message, answers), "content": content}


def with_text(message: Message, calls: str) -> str:
    return f"{message['content']}\n{calls}" if message["content"] else calls


def calls_in_the_models_syntax(message: Message, answers: AnswerFormat) -> Message:
    if not message.get("tool_calls") or (answers.calls.bare and message["content"]):
        return message
    calls = [ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return {
        **{key: value for key, value in message.items() if key != "tool_calls"},
        "content": with_text(message, answers.calls.render(calls)),
    }


def calls_as_a_list(message: Message, answers: AnswerFormat) -> Message:
    if not message.get("tool_calls"):
        return message
    content = with_text(message, f"Calling tools:\n{message['tool_calls']}")
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def a_name_added(message: Message, answers: AnswerFormat) -> Message:
    return {**message, "name": "agent"}


SPELLINGS: list[Callable[[Message, AnswerFormat], Message]] = [
    as_it_is,
    keys_in_another_order,
    thinking_dropped,
    thinking_in_the_content,
    calls_in_the_models_syntax,
    calls_as_a_list,
    a_name_added,
]
"""All say the same."""


def content_changed(message: Message) -> Message:
    return {**message, "content": message["content"] + " (edited)"}


def thinking_changed(message: Message) -> Message:
    return {**message, "reasoning_content": message.get("reasoning_content", "") + " and more"}


def call_changed(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return content_changed(message)
    function = {**calls[0]["function"], "arguments": {"a": 77}}
    return {**message, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}


EDITS = [content_changed, thinking_changed, call_changed]
"""None says what was said."""

WORDS = st.text(st.sampled_from("helo an12\né"), max_size=8)
ARGUMENTS = st.fixed_dictionaries({}, optional={"a": st.integers(0, 99), "b": WORDS})


@st.composite
def answers_of(draw: st.DrawFn, style: str, with_tools: bool) -> tuple[str, bool]:
    """The text of an answer, and whether it was finished: words, thinking, and calls well or badly written."""
    known = STYLES[style]
    text = draw(WORDS)
    if with_tools and known.calls is not None and draw(st.booleans()):
        syntax = TOOL_PARSERS[known.calls]
        calls = draw(st.lists(st.builds(ToolCall, st.sampled_from(["add", "look"]), ARGUMENTS), min_size=1, max_size=2))
        block = syntax.render(calls)
        text = block if syntax.bare else draw(st.sampled_from([block, f"{text}\n{block}", block[:-1]]))
    if known.thinks and draw(st.booleans()):
        thought = REASONING_PARSERS["think"].render(draw(WORDS), text)
        text = thought.removeprefix("<think>\n") if known.opens_thinking else thought
    return text, draw(st.sampled_from([True, True, True, False]))
