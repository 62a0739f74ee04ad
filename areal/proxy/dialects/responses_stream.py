"""A streamed Responses answer: every item is added, filled and done; the message stays open while calls are made."""

import itertools
from typing import Any

from areal.proxy.dialects import responses_wire as wire
from areal.proxy.dialects import sse
from areal.proxy.errors import ApiError
from areal.proxy.exchange import Call, CallMade, Reply


class ResponseWriter:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._numbers = itertools.count()
        self._output: list[wire.Item] = []
        """In order of appearance, each as it is known now."""
        self._thought: _TextItem | None = None
        self._message: _TextItem | None = None

    def begin(self, reply: Reply) -> bytes:
        self._reply = reply
        snapshot = {"response": wire.response(self._call, reply, [])}
        return self._event("response.created", **snapshot) + self._event("response.in_progress", **snapshot)

    def text(self, text: str) -> bytes:
        opening = self._close_thought() + self._open_message()
        assert self._message is not None
        self._message.text += text
        return opening + self._part_event("response.output_text.delta", self._message, delta=text, logprobs=[])

    def reasoning(self, text: str) -> bytes:
        opening = b""
        if self._thought is None:
            item = wire.reasoning_item(self._reply, None, "in_progress")
            self._thought = _TextItem(item["id"], self._add(item))
            opening = self._added(item) + self._part_added(self._thought, wire.thought_part(""))
        self._thought.text += text
        return opening + self._part_event("response.reasoning_text.delta", self._thought, delta=text)

    def call(self, call: CallMade) -> bytes:
        opening = self._close_thought()
        item = wire.call_item(self._reply, call, "", "in_progress")
        index = self._add(item)
        place = {"item_id": item["id"], "output_index": index}
        parts = [
            opening,
            self._added(item),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._done(index, wire.call_item(self._reply, call, call.arguments, "completed")),
        ]
        return b"".join(parts)

    def end(self, reply: Reply) -> bytes:
        (completion,) = reply.choices
        parts = [self._close_thought()]
        if not completion.message.get("tool_calls"):
            parts.append(self._open_message())  # an answer that says nothing is an empty message
        parts.append(self._close_message("incomplete" if completion.truncated else "completed"))
        name = "response.incomplete" if completion.truncated else "response.completed"
        parts.append(self._event(name, response=wire.response(self._call, reply, self._output)))
        return b"".join(parts)

    def failure(self, failure: ApiError) -> bytes:
        """Said twice: the documented event has the fields at its top, and SDKs raise where there is an `error`."""
        body = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", **body, error={"type": failure.kind, **body})

    def _open_message(self) -> bytes:
        if self._message is not None:
            return b""
        item = wire.message_item(self._reply, [], "in_progress")
        self._message = _TextItem(item["id"], self._add(item))
        return self._added(item) + self._part_added(self._message, wire.text_part(""))

    def _close_message(self, status: str) -> bytes:
        message = self._message
        if message is None:
            return b""
        part = wire.text_part(message.text)
        return (
            self._part_event("response.output_text.done", message, text=message.text, logprobs=[])
            + self._part_event("response.content_part.done", message, part=part)
            + self._done(message.index, wire.message_item(self._reply, [part], status))
        )

    def _close_thought(self) -> bytes:
        thought = self._thought
        if thought is None or thought.closed:
            return b""
        thought.closed = True
        return (
            self._part_event("response.reasoning_text.done", thought, text=thought.text)
            + self._part_event("response.content_part.done", thought, part=wire.thought_part(thought.text))
            + self._done(thought.index, wire.reasoning_item(self._reply, thought.text, "completed"))
        )

    def _add(self, item: wire.Item) -> int:
        self._output.append(item)
        return len(self._output) - 1

    def _added(self, item: wire.Item) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _done(self, index: int, item: wire.Item) -> bytes:
        self._output[index] = item
        return self._event("response.output_item.done", output_index=index, item=item)

    def _part_added(self, item: "_TextItem", part: dict[str, Any]) -> bytes:
        return self._part_event("response.content_part.added", item, part=part)

    def _part_event(self, name: str, item: "_TextItem", **values: Any) -> bytes:
        return self._event(name, item_id=item.id, output_index=item.index, content_index=0, **values)

    def _event(self, name: str, /, **values: Any) -> bytes:
        return sse.event(name, {"type": name, "sequence_number": next(self._numbers), **values})


class _TextItem:
    """An item whose text grows."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self.index = index
        self.text = ""
        self.closed = False
