"""Thinking apart from the answer: what stands between the marks that a model puts around it, at the beginning only."""

# MERGED-DOC
# Tool calls found in an answer while it grows.
#
# A call is said only when it is whole, because one that turns out malformed is text, and what was said cannot be unsaid.
# Whitespace beside a call belongs to the format: templates write it again themselves. What is said does not depend on
# how the answer was cut into pieces.
# How one model writes its answers: thinking first, then text with tool calls in it.

import re
from dataclasses import dataclass

from areal.trajectory.parsers.base import (
    Block,
    Event,
    Reasoning,
    Said,
    Text,
    ToolCall,
    Tools,
    ToolSyntax,
    partial_suffix,
)


@dataclass(frozen=True)
class ReasoningMarks:
    name: str
    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking: some templates write the opening mark for the model."""
        return prompt.rstrip().endswith(self.open)

    def render(self, reasoning: str, content: str) -> str:
        return f"{self.open}\n{reasoning}\n{self.close}\n\n{content}"


class ReasoningReader:
    """Splits a growing answer; `feed` and `finish` give what is new of (thinking, content).

    White space beside a mark belongs to the format. Thinking that is never closed is thinking to the end.
    """

    def __init__(self, marks: ReasoningMarks, inside: bool) -> None:
        self._marks = marks
        self._held = ""
        self._state = self._inside if inside else self._before
        self._begun = False
        """Something other than white space was said in the present part."""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        return self._state(False)

    def finish(self) -> tuple[str, str]:
        return self._state(True)

    def _before(self, ended: bool) -> tuple[str, str]:
        start = self._held.lstrip()
        if start.startswith(self._marks.open):
            self._held, self._state = start[len(self._marks.open) :], self._inside
            return self._inside(ended)
        if self._marks.open.startswith(start) and not ended:
            return "", ""
        self._state, self._begun = self._behind, True
        return self._behind(ended)

    def _inside(self, ended: bool) -> tuple[str, str]:
        if not self._begun:
            self._held = self._held.lstrip()
        thought, closed, rest = self._held.partition(self._marks.close)
        if closed:
            self._held, self._state, self._begun = rest, self._behind, False
            return thought.rstrip(), self._behind(ended)[1]
        if not ended:
            thought = thought[: len(thought) - partial_suffix(thought, self._marks.close)].rstrip()
        self._held = self._held[len(thought) :]
        self._begun = self._begun or bool(thought)
        return thought, ""

    def _behind(self, ended: bool) -> tuple[str, str]:
        content, self._held = self._held if self._begun else self._held.lstrip(), ""
        self._begun = self._begun or bool(content)
        return "", content


PEEK = 64
"""Characters of a block within which it is asked whether it may be one at all."""

_SPACE = re.compile(r"\s*")
_JOINT = re.compile(r"\s*;?\s*")


class CallReader:
    def __init__(self, syntax: ToolSyntax, tools: Tools) -> None:
        self._syntax = syntax
        self._tools = tools
        self._held = ""
        self._looked = 0
        """How much of the held text has been searched for the end of a block."""
        self._in_block = False
        self._skip = 0
        """Length of what stands before the block and is dropped with it: white space, and what joins bare calls."""
        self._joint: re.Pattern[str] | None = _SPACE if syntax.bare else None
        """What may stand before a bare call here; None = none may stand here."""
        self._writer = _TextWriter()

    def feed(self, text: str) -> list[Event]:
        self._held += text
        return self._advance(ended=False)

    def finish(self) -> list[Event]:
        return [*self._advance(ended=True), *self._writer.finish()]

    def _advance(self, ended: bool) -> list[Event]:
        events: list[Event] = []
        while self._held and (self._in_block or self._find_block(events, ended)):
            block = self._read_block(ended)
            if block is None:
                return events
            end = self._skip + block.end
            self._in_block, self._looked, self._skip = False, 0, 0
            if block.calls:
                events += self._writer.calls(block.calls)
                self._joint = _JOINT if self._syntax.bare else None
                self._held = self._held[end:]
            else:
                self._say(events, end)
        return events

    def _find_block(self, events: list[Event], ended: bool) -> bool:
        """Say what stands before the next block; False if none begins in what is held."""
        if self._joint is not None:
            before = self._joint.match(self._held)
            assert before is not None
            if before.end() == len(self._held) and not ended:
                return False
            self._joint = None
            if self._held.startswith(self._syntax.bare, before.end()):
                self._skip, self._in_block = before.end(), True
                return True
        places = [at for at in map(self._held.find, self._syntax.marks) if at >= 0]
        self._in_block = bool(places)
        self._say(events, min(places) if places else len(self._held) - (0 if ended else self._partial_mark()))
        return self._in_block

    def _read_block(self, ended: bool) -> Block | None:
        """The block that the held text begins with; one without calls is text; None = not known yet."""
        text, syntax, looked = self._held[self._skip :], self._syntax, self._looked
        refused = Block([], next((len(mark) for mark in syntax.marks if text.startswith(mark)), len(syntax.bare)))
        if looked < PEEK and not syntax.may_begin(text):
            return refused
        self._looked = len(text)
        if not ended and not any(closer in text[max(0, looked - len(closer)) :] for closer in syntax.closers):
            return None
        try:
            block = syntax.read(text, self._tools, ended)
        except ValueError:
            return refused
        return refused if block is None and ended else block

    def _partial_mark(self) -> int:
        """How many characters at the end may be the beginning of a mark."""
        return max(map(partial_suffix, [self._held] * len(self._syntax.marks), self._syntax.marks), default=0)

    def _say(self, events: list[Event], length: int) -> None:
        events += self._writer.text(self._held[:length])
        self._held = self._held[length:]


class _TextWriter:
    """Text around calls: pieces on lines of their own, without the white space beside a call."""

    def __init__(self) -> None:
        self._space = ""
        self._said = False
        self._behind_call = False

    def text(self, piece: str) -> list[Event]:
        piece = self._space + piece
        body = piece.rstrip()
        self._space = piece[len(body) :]
        if not body:
            return []
        if self._behind_call:
            body = ("\n" if self._said else "") + body.lstrip()
            self._behind_call = False
        self._said = True
        return [Text(body)]

    def calls(self, calls: list[ToolCall]) -> list[Event]:
        if calls:
            self._space, self._behind_call = "", True
        return [*calls]

    def finish(self) -> list[Event]:
        return [Text(self._space)] if self._space and not self._behind_call else []


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
