"""What every way of writing tool calls has: marks that open a block, a reader of blocks, a writer of calls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from areal.trajectory.parsers.events import ToolCall
from areal.trajectory.parsers.json_text import write_json

PLAIN_NAME = re.compile(r"[\w.\-]+")

Tools = Sequence[dict[str, Any]]
"""Tools as Chat Completions writes them: {"type": "function", "function": {"name", "parameters"}}."""


@dataclass(frozen=True)
class Block:
    """Calls that stand in the text, up to `end`."""

    calls: list[ToolCall]
    end: int


@dataclass(frozen=True)
class CallFrame:
    """The fixed text around names and JSON arguments, for writing calls and for grammars that force them."""

    begin: str = ""
    before_name: str = ""
    before_arguments: str = ""
    after: str = ""
    between: str = ""
    end: str = ""

    def render(self, calls: Sequence[ToolCall]) -> str:
        parts = (
            f"{self.before_name}{c.name}{self.before_arguments}{write_json(c.arguments)}{self.after}" for c in calls
        )
        return f"{self.begin}{self.between.join(parts)}{self.end}"


class ToolSyntax:
    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """Each opens a block wherever it stands."""
    bare: ClassVar[str] = ""
    """Opens a block where a call may stand without a mark: at the beginning, and behind another call."""
    closers: ClassVar[tuple[str, ...]]
    """A block ends with one of these, so a stream looks for its end only when one arrives."""
    call_end: ClassVar[str | None] = None
    """A stop text behind the first call of an answer; None where calls have no end of their own."""
    frame: ClassVar[CallFrame | None] = None
    """None where arguments are not written as JSON."""

    def may_begin(self, text: str) -> bool:
        """Whether this beginning of a block, mark included, may become one. False must stay False with more text."""
        raise NotImplementedError

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        """The block at the beginning of `text`; None if it is none, or not yet. A block stays one with more text.

        `ended` = no more text comes. Raises ValueError where no further text can make it a block.
        """
        raise NotImplementedError

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as this model family writes them; raises ValueError for what the syntax cannot say."""
        assert self.frame is not None
        if not all(PLAIN_NAME.fullmatch(call.name) for call in calls):
            raise ValueError(f"a tool's name must be plain, got {[call.name for call in calls]}")
        return self.frame.render(calls)
