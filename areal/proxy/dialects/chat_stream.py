"""A streamed Chat Completions answer: the role, what is said, why it ended, and the usage if it was asked for."""

from typing import Any

from areal.proxy.dialects import chat_wire, sse
from areal.proxy.errors import ApiError
from areal.proxy.exchange import Call, CallMade, Reply


class ChatWriter:
    def __init__(self, call: Call) -> None:
        self._usage: dict[str, Any] = {"usage": None} if call.stream_usage else {}
        self._envelope: dict[str, Any] = {}

    def begin(self, reply: Reply) -> bytes:
        self._envelope = chat_wire.envelope(reply, "chat.completion.chunk")
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def reasoning(self, text: str) -> bytes:
        return self._chunk({"reasoning_content": text})

    def call(self, call: CallMade) -> bytes:
        """The name first, then the arguments, as the hosted service does."""
        function = {"name": call.name, "arguments": ""}
        head = {"index": call.number, "id": call.id, "type": "function", "function": function}
        tail = {"index": call.number, "function": {"arguments": call.arguments}}
        return self._chunk({"tool_calls": [head]}) + self._chunk({"tool_calls": [tail]})

    def end(self, reply: Reply) -> bytes:
        (completion,) = reply.choices
        last = self._chunk({}, chat_wire.finish_reason(completion), chat_wire.logprobs(reply, 0))
        if self._usage:
            last += sse.data({**self._envelope, "choices": [], "usage": chat_wire.usage(reply)})
        return last + sse.DONE

    def failure(self, failure: ApiError) -> bytes:
        body = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
        return sse.data({"error": body})

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.data({**self._envelope, "choices": [choice], **self._usage})
