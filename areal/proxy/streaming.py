"""An answer read while its tokens come: the same text, thinking and tool calls that the finished answer has.

Text is given out in pieces that never change afterwards. A piece ends where a character ends, and before anything that
may turn out to be a stop text. The pieces join to what the whole answer decodes to, up to its stop text.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from areal.proxy.types import ToolCallEvent
from areal.trajectory.answer import tool_call
from areal.trajectory.message import arguments_text
from areal.trajectory.parsers.base import Event, Reasoning, Text, Tools
from areal.trajectory.rendering import Renderer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the beginning of a character decodes to."""


class AnswerStream:
    """Tokens in, events out."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        name: str,
        tools: Tools | None,
        thinking: bool,
        stop_ids: Collection[int],
        stop_texts: Sequence[str],
        byte_ids: Collection[int],
    ) -> None:
        self._name = name
        self._text = TokenText(renderer, byte_ids, stop_ids)
        self._stop = StopFilter(stop_texts)
        self._reader = renderer.format.reader(tools, thinking=thinking)
        self._calls = 0

    def feed(self, tokens: Sequence[int]) -> Iterator[Text | Reasoning | ToolCallEvent]:
        return self._events(self._reader.feed(self._stop.feed(self._text.feed(tokens))))

    def finish(self, text: str, *, cut: bool = False) -> Iterator[Text | Reasoning | ToolCallEvent]:
        """The rest; `text` is the whole answer's, without its end token; `cut` as in `AnswerFormat.read`."""
        rest = self._stop.feed(self._text.rest(text)) + self._stop.finish()
        return self._events([*self._reader.feed(rest), *self._reader.finish(cut=cut)])

    def _events(self, events: Sequence[Event]) -> Iterator[Text | Reasoning | ToolCallEvent]:
        for event in events:
            if isinstance(event, Text | Reasoning):
                yield event
                continue
            number, self._calls = self._calls, self._calls + 1
            call_id = tool_call(event, self._name, number)["id"]
            yield ToolCallEvent(number, call_id, event.name, arguments_text(event.arguments))


class TokenText:
    """The text of ids while they come, up to the last whole character."""

    def __init__(self, renderer: Renderer, byte_ids: Collection[int], end_ids: Collection[int]) -> None:
        """`byte_ids` are tokens that stand for one byte; `end_ids` are those that end an answer and are not text."""
        self._renderer = renderer
        self._byte_ids = byte_ids
        self._end_ids = end_ids
        self._ids: list[int] = []
        # Decoding begins a few tokens early, at `_anchor`, because some tokenizers write a first token differently;
        # `_known` characters from there on were given out.
        self._anchor = self._read = self._known = 0
        self.length = 0
        """Characters given out."""

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += ids
        last = self._ids[-1]
        if last in self._end_ids or last in self._byte_ids:  # a run of bytes is decoded as a whole
            return ""
        text = self._renderer.decode(self._ids[self._anchor :])
        end = len(text) - text.endswith(UNFINISHED)
        piece = text[self._known : end]
        self._known = max(self._known, end)
        if end == len(text):
            self._anchor, self._read = self._read, len(self._ids)
            self._known = len(self._renderer.decode(self._ids[self._anchor :]))
        self.length += len(piece)
        return piece

    def rest(self, text: str) -> str:
        """What is missing of the whole text."""
        return text[self.length :]


class StopFilter:
    """Lets text through up to the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        if self._stopped or not self._stops:
            return "" if self._stopped else text
        self._held += text
        end = next((at for at in range(len(self._held)) if self._may_stop(at)), len(self._held))
        piece, self._held = self._held[:end], self._held[end:]
        self._stopped = any(self._held.startswith(stop) for stop in self._stops)
        return piece

    def finish(self) -> str:
        """What was held back and is not a stop text after all."""
        if self._stopped:
            return ""
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        return self._held[: min(found)] if found else self._held

    def _may_stop(self, at: int) -> bool:
        """Whether a stop text, or a beginning of one whose rest may come, is there."""
        return any(self._held.startswith(stop, at) or stop.startswith(self._held[at:]) for stop in self._stops)


def byte_token_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens like `<0x0A>`, with which some vocabularies spell what they have no token for."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)
    known = [(name, token) for name, token in zip(names, ids, strict=True) if token is not None]
    return frozenset(token for name, token in known if tokenizer.convert_ids_to_tokens(token) == name)
