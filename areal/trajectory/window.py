"""The part of a long conversation that decides how its end is rendered.

Chat templates write a message as its role, its neighbours, the system message, the tools and the last question decide.
So the end of a long conversation is rendered behind its system messages, its last question and the answer before, and a
turn costs what it adds. Thinking may be dropped when a new question comes: everything since the last one is kept then.
Whether that holds for a template is checked on whole conversations: the first few times, and whenever one has doubled.
"""

from areal.trajectory.meaning import Message
from areal.trajectory.pictures import text_of
from areal.utils import logging

WHOLE = 16
"""Conversations of at most so many messages are rendered whole."""

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
    question = _last_question(before) if len(before) > WHOLE else None
    if question is None:
        return before
    system = next(place for place, message in enumerate(before) if message["role"] != "system")
    begin = question + 1
    if all(message["role"] in ("assistant", "tool") for message in newer):
        begin = max(begin, _last_answer(before))
    return [*before[:system], before[question], *before[begin:]]


def _last_question(messages: list[Message]) -> int | None:
    """Some clients send tool results as a user's words; templates that know this do not take them for a question."""
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message["role"] == "user" and not text_of(message["content"]).startswith("<tool_response>"):
            return place
    return None


def _last_answer(messages: list[Message]) -> int:
    places = range(len(messages) - 1, -1, -1)
    return next((place for place in places if messages[place]["role"] == "assistant"), 0)
