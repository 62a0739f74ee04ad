"""What an answer says, piece by piece: text for the client, thinking, and whole tool calls."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    written_id: str | None = None
    """The id that the model wrote beside the call, where its syntax has one."""


Event = Text | Reasoning | ToolCall


@dataclass(frozen=True)
class Said:
    """A whole answer: the sum of its events."""

    content: str
    reasoning: str
    calls: list[ToolCall]

    @classmethod
    def of(cls, events: list[Event]) -> "Said":
        return cls(
            content="".join(event.text for event in events if isinstance(event, Text)),
            reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
            calls=[event for event in events if isinstance(event, ToolCall)],
        )
