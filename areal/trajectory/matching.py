"""Conversations as clients send them, made comparable with what was recorded.

A client sends its whole conversation with every call, and spells earlier answers its own way. `normalised` moves
thinking and tool calls that it wrote into the text of an assistant's message to their own fields. Only what is certain
is moved: thinking by its marks; calls in the model's own syntax, or as the list of calls that the wire has, in JSON or
as Python prints it, after an optional line that announces it. Anything else stays text.

Every prefix of a conversation has a digest. `ConversationCache` keeps those of the latest calls, so that only messages
that are new are normalised and digested. Which recorded completion has one of these digests is the tree's business.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from areal.trajectory.message import EMPTY, Digest, Message, call_ids, extend_digest, parse_arguments
from areal.trajectory.parsers import AnswerFormat
from areal.trajectory.parsers.base import Tools

MAX_CACHED = 4
"""This many conversations can alternate in a session without being digested again."""

Normalise = Callable[[Message], Message]


class Conversation:
    """The messages of one call, and what identifies each prefix of them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """As the client sent them."""
        self.digests: list[Digest] = []
        """Of every prefix, shortest first."""
        self.call_ids: dict[str, str] = {}
        """Tool-call id -> the place of that call in the conversation."""
        self.reasoning: dict[int, str] = {}
        """Place of an answer -> the thinking that the client sent with it."""
        self._ambiguous: list[int] = []
        """Places of calls with arguments that Python takes for others: `True == 1 == 1.0`."""

    @property
    def digest(self) -> Digest:
        return self.digests[-1] if self.digests else EMPTY

    def common_length(self, messages: list[Message]) -> int:
        """How many messages at the beginning are the same."""
        known = self.messages
        if messages[: len(known)] == known:
            common = len(known)
        else:
            pairs = enumerate(zip(known, messages, strict=False))
            common = next((place for place, (one, other) in pairs if one != other), min(len(known), len(messages)))
        doubtful = (place for place in self._ambiguous if place < common)
        return next((place for place in doubtful if _calls_json(known[place]) != _calls_json(messages[place])), common)

    def append(self, message: Message, normal: Message) -> None:
        self._add(message, normal, extend_digest(self.digest, normal, self.call_ids))

    def beginning(self, length: int, normalise: Normalise) -> "Conversation":
        """A conversation of the first messages."""
        shorter = Conversation()
        for message, digest in zip(self.messages[:length], self.digests[:length], strict=True):
            shorter._add(message, normalise(message), digest)
        return shorter

    def _add(self, message: Message, normal: Message, digest: Digest) -> None:
        place = len(self.messages)
        for number, call_id in enumerate(call_ids(normal)):
            self.call_ids[call_id] = f"{place}.{number}"
        if normal["role"] == "assistant" and normal.get("reasoning_content"):
            self.reasoning[place] = normal["reasoning_content"]
        if any(_holds_zero_or_one(call["function"]["arguments"]) for call in message.get("tool_calls", ())):
            self._ambiguous.append(place)
        self.messages.append(message)
        self.digests.append(digest)


class ConversationCache:
    """The conversations of a session's latest calls."""

    def __init__(self) -> None:
        self._latest: list[Conversation] = []

    def read(self, messages: list[Message], normalise: Normalise) -> Conversation:
        """The conversation of exactly these messages. It belongs to the cache, and grows with a later call."""
        candidates = [(known.common_length(messages), -age, known) for age, known in enumerate(self._latest)]
        common, _, known = max(candidates, default=(0, 0, Conversation()))
        conversation = known if common == len(known.messages) else known.beginning(common, normalise)
        for message in messages[common:]:
            conversation.append(message, normalise(message))
        others = (other for other in self._latest if other is not conversation)
        self._latest = [conversation, *others][:MAX_CACHED]
        return conversation

    def known_length(self, messages: list[Message]) -> int:
        """How many messages at the beginning were read before."""
        return max((known.common_length(messages) for known in self._latest), default=0)

    def take(self, other: "ConversationCache") -> None:
        """Keep what another cache has read."""
        self._latest = [*other._latest, *self._latest][:MAX_CACHED]


def _calls_json(message: Message) -> str:
    return json.dumps(message["tool_calls"], sort_keys=True)  # orjson refuses numbers beyond 64 bits


def _holds_zero_or_one(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_zero_or_one, value.values()))
    return any(map(_holds_zero_or_one, value)) if isinstance(value, list) else value in (0, 1)


def normalised(message: Message, format: AnswerFormat, tools: Tools | None) -> Message:
    """The message with thinking and calls moved out of its text; the same object if there are none."""
    if message["role"] != "assistant":
        return message
    marks = format.reasoning
    sent_apart = message.get("reasoning_content")
    if marks is not None and not sent_apart and message["content"].lstrip().startswith(marks.open):
        parsed = format.read(message["content"], None)
        message = {**message, "content": parsed.content, "reasoning_content": parsed.reasoning}
    return message if message.get("tool_calls") else _with_calls(message, format, tools)


def _with_calls(message: Message, format: AnswerFormat, tools: Tools | None) -> Message:
    content, syntax = message["content"], format.calls
    if any(mark in content for mark in syntax.marks) or (syntax.bare and content.lstrip().startswith(syntax.bare)):
        parsed = AnswerFormat(syntax).read(content, tools or ())
        if parsed.calls:
            calls = [{"id": "", "function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls]
            return {**message, "content": parsed.content, "tool_calls": calls}
    begin = _LIST_BEGIN.search(content) if "function" in content else None
    listed = None if begin is None else _listed_calls(content[begin.end() :].rstrip())
    if begin is None or listed is None:
        return message
    return {**message, "content": content[: begin.start()], "tool_calls": listed}


_LIST_BEGIN = re.compile(r"(?:\A|\n)(?:[^\n\[\]{}]{0,40}:\n?)? ?(?=\[\s*\{)")


def _listed_calls(text: str) -> list[dict[str, Any]] | None:
    for read in (json.loads, ast.literal_eval):
        try:
            written = json.dumps(read(text), ensure_ascii=False)
            written.encode()  # a lone surrogate is valid JSON but cannot be rendered
            calls = json.loads(written)
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue  # Python may write what JSON cannot, such as a set
        if isinstance(calls, list) and all(map(_is_call, calls)):
            return [_with_parsed_arguments(call) for call in calls]
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), dict | str)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": call["id"], "function": {**function, "arguments": parse_arguments(function["arguments"])}}
