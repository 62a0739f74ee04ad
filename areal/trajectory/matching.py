"""The meanings of the conversations that a session carries on, each message digested once.

A client sends its whole conversation with every call. A line remembers the messages of an earlier call and the digest
of each prefix, so that only what is new must be read.
"""

# MERGED-DOC
# Which recorded completion a conversation continues. Where that cannot be known for certain, a shorter one it does.
# Thinking and tool calls that a client wrote into the text of an assistant's message instead of their own fields.
#
# Thinking is certain by its marks. Two spellings of calls are certain to say the same as the calls themselves: the
# model's own syntax, and the list of calls as the wire has it, in JSON or as Python prints it, behind an optional line
# that announces it. Anything else stays text.

import ast
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from areal.trajectory.completion import Completion
from areal.trajectory.message import START, Digest, Message, call_ids, extend, parse_arguments, same_words
from areal.trajectory.parsers import AnswerFormat
from areal.trajectory.parsers.base import Tools

KEPT = 4
"""Lines remembered: as many conversations may take turns in a session without being digested again."""

Meant = Callable[[Message], Message]
"""A message with the thinking and the calls that its text may hold where they belong."""


class Line:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.digests: list[Digest] = []
        """Of every prefix, shortest first."""
        self.call_ids: dict[str, str] = {}
        """The place of the call that each id names."""
        self.thoughts: dict[int, str] = {}
        """The thinking that answers came with, by their places."""
        self._truths: list[int] = []
        """Places of calls with arguments that Python takes for others: `True == 1 == 1.0`."""

    @property
    def path(self) -> Digest:
        return self.digests[-1] if self.digests else START

    def common(self, messages: list[Message]) -> int:
        """How many messages at the beginning are the same."""
        known = self.messages
        if messages[: len(known)] == known:
            common = len(known)
        else:
            pairs = enumerate(zip(known, messages, strict=False))
            common = next((place for place, (one, other) in pairs if one != other), min(len(known), len(messages)))
        doubtful = (place for place in self._truths if place < common)
        return next((place for place in doubtful if _exactly(known[place]) != _exactly(messages[place])), common)

    def append(self, message: Message, meant: Message) -> None:
        self._add(message, meant, extend(self.path, meant, self.call_ids))

    def fork(self, length: int, meant: Meant) -> "Line":
        """A line of the first messages."""
        line = Line()
        for message, digest in zip(self.messages[:length], self.digests[:length], strict=True):
            line._add(message, meant(message), digest)
        return line

    def _add(self, message: Message, meant: Message, digest: Digest) -> None:
        place = len(self.messages)
        for number, call_id in enumerate(call_ids(meant)):
            self.call_ids[call_id] = f"{place}.{number}"
        if meant["role"] == "assistant" and meant.get("reasoning_content"):
            self.thoughts[place] = meant["reasoning_content"]
        if any(_holds_truth(call["function"]["arguments"]) for call in message.get("tool_calls", ())):
            self._truths.append(place)
        self.messages.append(message)
        self.digests.append(digest)


def _exactly(message: Message) -> str:
    return json.dumps(message["tool_calls"], sort_keys=True)  # a number beyond 64 bits may be among the arguments


def _holds_truth(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_truth, value.values()))
    return any(map(_holds_truth, value)) if isinstance(value, list) else value in (0, 1)


class Lines:
    def __init__(self) -> None:
        self._lines: list[Line] = []

    def read(self, messages: list[Message], meant: Meant) -> Line:
        """The line of exactly these messages, until the next one is read."""
        shared = [(line.common(messages), -age, line) for age, line in enumerate(self._lines)]
        common, _, known = max(shared, default=(0, 0, Line()))
        line = known if common == len(known.messages) else known.fork(common, meant)
        for message in messages[common:]:
            line.append(message, meant(message))
        self._lines = [line, *(other for other in self._lines if other is not line)][:KEPT]
        return line


class Recorded(Protocol):
    """What was said before."""

    completions: list[Completion]

    def by_path(self, path: Digest) -> list[Completion]: ...

    def conversation(self, completion: Completion) -> list[Message]: ...


def recognise(tree: Recorded, line: Line) -> tuple[Completion, int] | None:
    """The deepest completion whose conversation these messages begin with, and its answer's place in them."""
    for place in range(len(line.messages) - 1, -1, -1):
        candidates = tree.by_path(line.digests[place]) if line.messages[place]["role"] == "assistant" else []
        chosen = _choose(tree, candidates, line) if candidates else None
        if chosen is not None:
            return chosen, place
    return None


def _choose(tree: Recorded, candidates: list[Completion], line: Line) -> Completion | None:
    """Of completions that mean the same, the one meant; None if the client's words fit none, or several alike.

    Thinking that was sent back and tool-call ids tell them apart. If nothing does and all are the same tokens, it makes
    no difference to what is trained, and the most recent is taken.
    """
    if line.thoughts:
        candidates = [candidate for candidate in candidates if _same_thoughts(tree, candidate, line)]
    if len(candidates) > 1:
        named = [candidate for candidate in candidates if _call_ids(tree, candidate) <= line.call_ids.keys()]
        candidates = named or candidates
    if not candidates or not all(_same_ids(tree, candidates[-1], other) for other in candidates[:-1]):
        return None
    return candidates[-1]


def _same_thoughts(tree: Recorded, candidate: Completion, line: Line) -> bool:
    recorded = tree.conversation(candidate)
    return all(
        same_words(thought, recorded[place].get("reasoning_content", ""))
        for place, thought in line.thoughts.items()
        if place < len(recorded)
    )


def _call_ids(tree: Recorded, candidate: Completion) -> set[str]:
    return {call_id for message in tree.conversation(candidate) for call_id in call_ids(message)}


def _same_ids(tree: Recorded, one: Completion, other: Completion) -> bool:
    """Whether two completions are the same tokens behind the same tokens."""
    while one is not other:
        same_prompt = one.extends == other.extends and one.prompt_ids.tobytes() == other.prompt_ids.tobytes()
        if not same_prompt or one.output_ids.tobytes() != other.output_ids.tobytes():
            return False
        if one.parent is None or other.parent is None:
            return one.parent == other.parent
        one, other = tree.completions[one.parent], tree.completions[other.parent]
    return True


_LISTED = re.compile(r"(?:\A|\n)(?:[^\n\[\]{}]{0,40}:\n?)? ?(?=\[\s*\{)")


def meant(message: Message, format: AnswerFormat, tools: Tools | None) -> Message:
    """The message with thinking and calls out of the text; itself if there are none."""
    if message["role"] != "assistant":
        return message
    marks = format.reasoning
    thought = message.get("reasoning_content")
    if marks is not None and not thought and message["content"].lstrip().startswith(marks.open):
        said = format.read(message["content"], None)
        message = {**message, "content": said.content, "reasoning_content": said.reasoning}
    return message if message.get("tool_calls") else _with_calls(message, format, tools)


def _with_calls(message: Message, format: AnswerFormat, tools: Tools | None) -> Message:
    content, syntax = message["content"], format.calls
    if any(mark in content for mark in syntax.marks) or (syntax.bare and content.lstrip().startswith(syntax.bare)):
        said = AnswerFormat(syntax).read(content, tools or ())
        if said.calls:
            calls = [{"id": "", "function": {"name": call.name, "arguments": call.arguments}} for call in said.calls]
            return {**message, "content": said.content, "tool_calls": calls}
    listed = _LISTED.search(content) if "function" in content else None
    written = None if listed is None else _wire_calls(content[listed.end() :].rstrip())
    if listed is None or written is None:
        return message
    return {**message, "content": content[: listed.start()], "tool_calls": written}


def _wire_calls(text: str) -> list[dict[str, Any]] | None:
    for read in (json.loads, ast.literal_eval):
        try:
            calls = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(calls, list) and all(map(_is_call, calls)):
            return [_plain(call) for call in calls]
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), dict | str)


def _plain(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": call["id"], "function": {**function, "arguments": parse_arguments(function["arguments"])}}
