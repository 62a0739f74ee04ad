"""An answer read while its tokens come: the same text, thinking and tool calls that the finished answer has."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from areal.proxy.exchange import CallMade
from areal.proxy.token_text import StopFilter, TokenText
from areal.trajectory.answer import tool_call
from areal.trajectory.meaning import arguments_text
from areal.trajectory.parsers import Event, Reasoning, Text
from areal.trajectory.renderer import Renderer


class AnswerStream:
    def __init__(
        self,
        renderer: Renderer,
        *,
        name: str,
        tools: list[dict[str, Any]] | None,
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

    def feed(self, tokens: Sequence[int]) -> Iterator[Text | Reasoning | CallMade]:
        return self._events(self._reader.feed(self._stop.feed(self._text.feed(tokens))))

    def finish(self, text: str) -> Iterator[Text | Reasoning | CallMade]:
        """The rest; `text` is the whole answer's, its end token left out."""
        rest = self._stop.feed(self._text.rest(text)) + self._stop.finish()
        return self._events([*self._reader.feed(rest), *self._reader.finish()])

    def _events(self, events: Sequence[Event]) -> Iterator[Text | Reasoning | CallMade]:
        for event in events:
            if isinstance(event, Text | Reasoning):
                yield event
                continue
            number, self._calls = self._calls, self._calls + 1
            call_id = tool_call(event, self._name, number)["id"]
            yield CallMade(number, call_id, event.name, arguments_text(event.arguments))
