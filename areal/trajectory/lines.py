"""The meanings of the conversations that a session carries on, each message digested once.

A client sends its whole conversation with every call. A line remembers the messages of an earlier call and the digest
of each prefix, so that only what is new must be read.
"""

import json
from collections.abc import Callable
from typing import Any

from areal.trajectory.meaning import START, Digest, Message, call_ids, extend

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
