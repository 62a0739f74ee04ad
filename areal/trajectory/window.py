"""The part of a long conversation that decides how its end is rendered.

Chat templates write a message as its role, its neighbours, the system message, the tools and the last question decide.
So the end of a long conversation is rendered behind its system messages and its last question only, and a turn costs
what it adds. Thinking may be dropped when a new question comes, therefore everything since the last one is kept then.
Whether that holds for a template is checked on whole conversations: the first few times, and whenever one has doubled.
"""

from collections.abc import Callable

from areal.trajectory.meaning import Message
from areal.utils import logging

WHOLE = 16
"""Conversations of at most so many messages are rendered whole."""

ROUNDS = 2
"""Answers kept before the last one where no new question comes."""

FIRST_CHECKS = 8


class Windows:
    """Whether a template can be trusted to write the end of a conversation whatever its middle says."""

    def __init__(self) -> None:
        self.trusted = True
        self._checks = 0

    def due(self, depth: int) -> bool:
        """Whether to check a conversation of so many answers."""
        return self._checks < FIRST_CHECKS or depth & (depth - 1) == 0

    def check(self, same: bool) -> None:
        self._checks += 1
        if not same and self.trusted:
            self.trusted = False
            logging.getLogger("trajectory").warning(
                "the chat template writes the end of a conversation as its middle decides; long ones are rendered whole"
            )


def window(before: list[Message], newer: list[Message]) -> list[Message]:
    """Of the messages before an answer, those that decide how it and `newer` are rendered; all if they are few."""
    if len(before) <= WHOLE:
        return before
    system = next((place for place, message in enumerate(before) if message["role"] != "system"), len(before))
    question = _last(before, _is_question, len(before))
    if question is None:
        return before
    begin = question + 1
    if all(message["role"] in ("assistant", "tool") for message in newer):
        begin = max(begin, _rounds_back(before, begin))
    return [*before[:system], *before[question : question + 1], *before[begin:]]


def _is_question(message: Message) -> bool:
    """Some clients send tool results as a user's words; templates that know this do not take them for a question."""
    return message["role"] == "user" and not message["content"].startswith("<tool_response>")


def _rounds_back(before: list[Message], begin: int) -> int:
    place = len(before)
    for _ in range(ROUNDS):
        found = _last(before, lambda message: message["role"] == "assistant", place)
        if found is None or found < begin:
            return begin
        place = found
    return place


def _last(messages: list[Message], is_it: Callable[[Message], bool], end: int) -> int | None:
    return next((place for place in range(end - 1, -1, -1) if is_it(messages[place])), None)
