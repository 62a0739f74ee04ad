"""What every way of writing tool calls has in common: the events of an answer, `ToolSyntax`, and tools to parse with.

Text may not be finished yet when it is parsed, so parsing has three outcomes: found, not found yet (None), and never to
be found, whatever follows (ValueError). Nothing is repaired: what is not exactly a call stays text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


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
    """The id that the model wrote with the call, where its syntax has one."""


Event = Text | Reasoning | ToolCall


@dataclass(frozen=True)
class ParsedAnswer:
    """A whole answer: the sum of its events."""

    content: str
    reasoning: str
    calls: list[ToolCall]

    @classmethod
    def of(cls, events: list[Event]) -> "ParsedAnswer":
        return cls(
            content="".join(event.text for event in events if isinstance(event, Text)),
            reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
            calls=[event for event in events if isinstance(event, ToolCall)],
        )


Tools = Sequence[dict[str, Any]]
"""Tools as Chat Completions writes them: {"type": "function", "function": {"name", "parameters"}}."""


@dataclass(frozen=True)
class Block:
    """Calls found in the text, up to `end`."""

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
    """How a model family writes tool calls: marks that open a block, a reader of blocks, a writer of calls."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """Each opens a block wherever it occurs."""
    bare: ClassVar[str] = ""
    """Opens a block where a call may occur without a mark: at the beginning, and after another call."""
    closers: ClassVar[tuple[str, ...]]
    """A block ends with one of these, so a stream looks for its end only when one arrives."""
    call_end: ClassVar[str | None] = None
    """A stop text after the first call of an answer; None where calls have no end of their own."""
    frame: ClassVar[CallFrame | None] = None
    """None where arguments are not written as JSON."""
    short_call_ids: ClassVar[bool] = False
    """The family's chat templates insist on call ids of nine letters or digits."""

    def may_begin(self, text: str) -> bool:
        """Whether this beginning of a block, mark included, may become one. False must stay False with more text."""
        raise NotImplementedError

    def read(self, text: str, tools: Tools, ended: bool) -> Block | None:
        """The block at the beginning of `text`; None if there is none, or not yet. A block stays one with more text.

        `ended` = no more text comes. Raises ValueError where no further text can make it a block.
        """
        raise NotImplementedError

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as this model family writes them; raises ValueError for what the syntax cannot express."""
        assert self.frame is not None
        require_plain_names(calls)
        return self.frame.render(calls)


_PLAIN_NAME = re.compile(r"[\w.\-]+")


def require_plain_names(calls: Sequence[ToolCall]) -> None:
    if not all(_PLAIN_NAME.fullmatch(call.name) for call in calls):
        raise ValueError(
            f"a tool's name must consist of letters, digits, '_', '.' and '-', got {[call.name for call in calls]}"
        )


def named_call(call: Any, arguments_keys: tuple[str, ...], other_keys: frozenset[str] = frozenset()) -> ToolCall:
    """A call from a JSON object that has a name, arguments under one of the keys, and nothing else but `other_keys`."""
    keys = set(call) - other_keys - {"name"} if isinstance(call, dict) and "name" in call else set()
    key = keys.pop() if len(keys) == 1 else None
    if key not in arguments_keys:
        raise ValueError("a call must have a name and arguments, and nothing else")
    name, arguments = call["name"], call[key]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call's name must be a text and its arguments an object")
    return ToolCall(name, arguments)


_SPACE = re.compile(r"\s*")


def after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def after_mark(text: str, at: int, mark: str) -> int | None:
    """The end of the mark at `at`, white space before it allowed; None if the text ends too early to tell."""
    at = after_space(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if mark.startswith(text[at:]):
        return None
    raise ValueError(f"{mark} is missing")


def partial_suffix(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


_JSON_PIECE = re.compile(
    r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'  # a string
    r"|[^\"{}\[\]<>|`;\\]++"  # white space, numbers, words, commas: judged by the decoder
    r"|[{}\[\]]"
)
_OPEN_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+\\?\Z')


def json_end(text: str, at: int) -> int | None:
    """Where the object or array that begins at `at` ends; None if not yet. Raises ValueError if it never can."""
    depth = 0
    while at < len(text):
        piece = _JSON_PIECE.match(text, at)
        if piece is None:
            if _OPEN_STRING.match(text, at):
                return None
            raise ValueError("this is not JSON")
        depth += (text[at] in "{[") - (text[at] in "}]")
        at = piece.end()
        if depth == 0:
            return at
    return None


def read_json(text: str) -> Any:
    """Raises ValueError for what is not JSON, and for what could never be sent on as JSON."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        # Lone surrogates and 1e999 can be read but are neither UTF-8 nor JSON when written again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return value


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
