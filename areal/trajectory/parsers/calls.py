"""Tool calls found in an answer while it grows.

A call is said only when it is whole, because one that turns out malformed is text, and what was said cannot be unsaid.
Whitespace beside a call belongs to the format: templates write it again themselves. What is said does not depend on
how the answer was cut into pieces.
"""

import re

from areal.trajectory.parsers.events import Event, Text, ToolCall
from areal.trajectory.parsers.marks import partial_suffix
from areal.trajectory.parsers.syntax import Block, Tools, ToolSyntax

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
