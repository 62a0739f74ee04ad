"""How one model writes its answers, and a reader of them while they grow: thinking first, then text with tool calls.

What comes out does not depend on how the answer was cut into pieces. A call comes out only when it is whole: one that
turns out to be malformed is text, and what was sent to a client cannot be taken back. White space next to thinking and
calls belongs to the format, because templates write it themselves.
"""

import re
from dataclasses import dataclass

from areal.trajectory.parsers.base import (
    Block,
    Event,
    ParsedAnswer,
    Reasoning,
    Text,
    ToolCall,
    Tools,
    ToolSyntax,
    partial_suffix,
)

PEEK = 64
"""`may_begin` is checked only within this many characters of a block's beginning."""


@dataclass(frozen=True)
class ReasoningMarks:
    """What a model puts around its thinking, at the beginning of an answer only."""

    name: str
    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking: some templates write the opening mark for the model."""
        return prompt.rstrip().endswith(self.open)

    def render(self, reasoning: str, content: str) -> str:
        return f"{self.open}\n{reasoning}\n{self.close}\n\n{content}"


@dataclass(frozen=True)
class AnswerFormat:
    calls: ToolSyntax
    reasoning: ReasoningMarks | None = None
    """None = the model does not mark its thinking."""

    def reader(self, tools: Tools | None, *, thinking: bool = False) -> "AnswerReader":
        """`tools` None = the caller offered none, and nothing is a call; `thinking` = the prompt opened it already."""
        reasoning = None if self.reasoning is None else _ReasoningReader(self.reasoning, thinking)
        return AnswerReader(reasoning, None if tools is None else _CallReader(self.calls, tools))

    def read(self, text: str, tools: Tools | None, *, thinking: bool = False, cut: bool = False) -> ParsedAnswer:
        """`cut` = the text was to go on: the beginning of a call at its end is nothing."""
        reader = self.reader(tools, thinking=thinking)
        return ParsedAnswer.of([*reader.feed(text), *reader.finish(cut=cut)])


class AnswerReader:
    """One answer, read while it grows."""

    def __init__(self, reasoning: "_ReasoningReader | None", calls: "_CallReader | None") -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Event]:
        thought, content = self._reasoning.feed(text) if self._reasoning else ("", text)
        return self._events(thought, content)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """What was held back; nothing may be fed afterwards. `cut` as in `AnswerFormat.read`."""
        thought, content = self._reasoning.finish() if self._reasoning else ("", "")
        return [*self._events(thought, content), *(self._calls.finish(cut=cut) if self._calls else [])]

    def _events(self, thought: str, content: str) -> list[Event]:
        events: list[Event] = [Reasoning(thought)] if thought else []
        if self._calls is not None:
            events += self._calls.feed(content)
        elif content:
            events.append(Text(content))
        return events


class _ReasoningReader:
    """Splits a growing answer; `feed` and `finish` return what is new of (thinking, content).

    Thinking that is never closed is thinking to the end.
    """

    def __init__(self, marks: ReasoningMarks, inside: bool) -> None:
        self._marks = marks
        self._held = ""
        self._state = self._inside if inside else self._before
        self._begun = False
        """The present part has something other than white space already."""

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
        self._state, self._begun = self._after, True
        return self._after(ended)

    def _inside(self, ended: bool) -> tuple[str, str]:
        if not self._begun:
            self._held = self._held.lstrip()
        thought, closed, rest = self._held.partition(self._marks.close)
        if closed:
            self._held, self._state, self._begun = rest, self._after, False
            return thought.rstrip(), self._after(ended)[1]
        if not ended:
            thought = thought[: len(thought) - partial_suffix(thought, self._marks.close)].rstrip()
        self._held = self._held[len(thought) :]
        self._begun = self._begun or bool(thought)
        return thought, ""

    def _after(self, ended: bool) -> tuple[str, str]:
        content, self._held = self._held if self._begun else self._held.lstrip(), ""
        self._begun = self._begun or bool(content)
        return "", content


_SPACE = re.compile(r"\s*")
_BETWEEN_BARE_CALLS = re.compile(r"\s*;?\s*")


class _CallReader:
    """Finds tool calls in growing text."""

    def __init__(self, syntax: ToolSyntax, tools: Tools) -> None:
        self._syntax = syntax
        self._tools = tools
        self._held = ""
        self._searched = 0
        """How much of the held text has been searched for the end of a block."""
        self._in_block = False
        self._skip = 0
        """Length of what precedes the block and is dropped with it: white space, and what joins bare calls."""
        self._before_bare: re.Pattern[str] | None = _SPACE if syntax.bare else None
        """What may precede a bare call here; None = there can be none here."""
        self._writer = _TextWriter()

    def feed(self, text: str) -> list[Event]:
        self._held += text
        return self._advance(ended=False)

    def finish(self, *, cut: bool = False) -> list[Event]:
        return [*self._advance(ended=True, cut=cut), *self._writer.finish()]

    def _advance(self, ended: bool, cut: bool = False) -> list[Event]:
        events: list[Event] = []
        while self._held and (self._in_block or self._find_block(events, ended and not cut)):
            block = self._read_block(ended, cut)
            if block is None:
                return events
            end = self._skip + block.end
            self._in_block, self._searched, self._skip = False, 0, 0
            if block.calls:
                events += self._writer.calls(block.calls)
                self._before_bare = _BETWEEN_BARE_CALLS if self._syntax.bare else None
                self._held = self._held[end:]
            else:
                self._release(events, end)
        return events

    def _find_block(self, events: list[Event], ended: bool) -> bool:
        """Release what precedes the next block; False if none begins in what is held."""
        if self._before_bare is not None:
            before = self._before_bare.match(self._held)
            assert before is not None
            if before.end() == len(self._held) and not ended:
                return False
            self._before_bare = None
            if self._held.startswith(self._syntax.bare, before.end()):
                self._skip, self._in_block = before.end(), True
                return True
        places = [at for at in map(self._held.find, self._syntax.marks) if at >= 0]
        self._in_block = bool(places)
        self._release(events, min(places) if places else len(self._held) - (0 if ended else self._partial_mark()))
        return self._in_block

    def _read_block(self, ended: bool, cut: bool) -> Block | None:
        """The block that the held text begins with; one without calls is text; None = not known yet, or never."""
        text, syntax, searched = self._held[self._skip :], self._syntax, self._searched
        refused = Block([], next((len(mark) for mark in syntax.marks if text.startswith(mark)), len(syntax.bare)))
        if searched < PEEK and not syntax.may_begin(text):
            return refused
        self._searched = len(text)
        begin = 0 if cut else searched
        closed = any(closer in text[max(0, begin - len(closer)) :] for closer in syntax.closers)
        if not closed and (cut or not ended):
            return None
        try:
            block = syntax.read(text, self._tools, ended)
        except ValueError:
            return refused
        return refused if block is None and ended and not cut else block

    def _partial_mark(self) -> int:
        """How many characters at the end may be the beginning of a mark."""
        return max((partial_suffix(self._held, mark) for mark in self._syntax.marks), default=0)

    def _release(self, events: list[Event], length: int) -> None:
        events += self._writer.text(self._held[:length])
        self._held = self._held[length:]


class _TextWriter:
    """Text around calls: pieces on lines of their own, without the white space next to a call."""

    def __init__(self) -> None:
        self._space = ""
        self._written = False
        self._after_call = False

    def text(self, piece: str) -> list[Event]:
        piece = self._space + piece
        body = piece.rstrip()
        self._space = piece[len(body) :]
        if not body:
            return []
        if self._after_call:
            body = ("\n" if self._written else "") + body.lstrip()
            self._after_call = False
        self._written = True
        return [Text(body)]

    def calls(self, calls: list[ToolCall]) -> list[Event]:
        self._space, self._after_call = "", True
        return [*calls]

    def finish(self) -> list[Event]:
        return [Text(self._space)] if self._space and not self._after_call else []
