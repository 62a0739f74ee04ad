"""How one model writes its answers: thinking first, then text with tool calls in it."""

from dataclasses import dataclass

from areal.trajectory.parsers.calls import CallReader
from areal.trajectory.parsers.events import Event, Reasoning, Said, Text
from areal.trajectory.parsers.reasoning import ReasoningMarks, ReasoningReader
from areal.trajectory.parsers.syntax import Tools, ToolSyntax


class AnswerReader:
    """One answer, read while it grows. What is said does not depend on how the text is cut into pieces."""

    def __init__(self, thoughts: ReasoningReader | None, calls: CallReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def feed(self, text: str) -> list[Event]:
        thought, content = self._thoughts.feed(text) if self._thoughts else ("", text)
        return [*_reasoning(thought), *self._content(content)]

    def finish(self) -> list[Event]:
        """What was held back; nothing may be fed afterwards."""
        thought, content = self._thoughts.finish() if self._thoughts else ("", "")
        return [*_reasoning(thought), *self._content(content), *(self._calls.finish() if self._calls else [])]

    def _content(self, text: str) -> list[Event]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Text(text)] if text else []


@dataclass(frozen=True)
class AnswerFormat:
    calls: ToolSyntax
    reasoning: ReasoningMarks | None = None
    """None = the model does not mark its thinking."""

    def reader(self, tools: Tools | None, *, thinking: bool = False) -> AnswerReader:
        """`tools` None = the caller offered none, and nothing is a call; `thinking` = the prompt opened it already."""
        thoughts = None if self.reasoning is None else ReasoningReader(self.reasoning, thinking)
        return AnswerReader(thoughts, None if tools is None else CallReader(self.calls, tools))

    def read(self, text: str, tools: Tools | None, *, thinking: bool = False) -> Said:
        reader = self.reader(tools, thinking=thinking)
        return Said.of([*reader.feed(text), *reader.finish()])


def _reasoning(text: str) -> list[Event]:
    return [Reasoning(text)] if text else []
