"""A streamed Messages answer: one block open at a time, each started, filled and stopped."""

from typing import Any

from areal.proxy.dialects import messages_wire as wire
from areal.proxy.dialects import sse
from areal.proxy.errors import ApiError
from areal.proxy.exchange import Call, CallMade, Reply


class MessageWriter:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks = 0
        self._open: str | None = None
        """Type of the block that is open."""

    def begin(self, reply: Reply) -> bytes:
        return self._event("message_start", message=wire.message(self._call, reply))

    def text(self, text: str) -> bytes:
        return self._block("text", wire.text_block("")) + self._delta(type="text_delta", text=text)

    def reasoning(self, text: str) -> bytes:
        return self._block("thinking", wire.thinking_block("")) + self._delta(type="thinking_delta", thinking=text)

    def call(self, call: CallMade) -> bytes:
        opening = self._close() + self._block("tool_use", wire.tool_block(call.id, call.name, {}))
        return opening + self._delta(type="input_json_delta", partial_json=call.arguments)

    def end(self, reply: Reply) -> bytes:
        opening = b"" if self._blocks else self._block("text", wire.text_block(""))
        ending = wire.ending(self._call, reply.choices[0])
        return (
            opening
            + self._close()
            + self._event("message_delta", delta=ending, usage=wire.usage(reply))
            + self._event("message_stop")
        )

    def failure(self, failure: ApiError) -> bytes:
        return sse.event("error", wire.error(failure))

    def _block(self, kind: str, content: dict[str, Any]) -> bytes:
        """Open a block of that type, unless it is open."""
        if self._open == kind:
            return b""
        closing = self._close()
        self._open = kind
        self._blocks += 1
        return closing + self._event("content_block_start", index=self._blocks - 1, content_block=content)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return self._event("content_block_stop", index=self._blocks - 1)

    def _delta(self, **delta: Any) -> bytes:
        return self._event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _event(self, name: str, /, **values: Any) -> bytes:
        return sse.event(name, {"type": name, **values})
