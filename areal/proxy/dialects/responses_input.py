"""The input of a Responses request, a list of items, made a conversation of messages.

An answer is several items there (thinking, a message, function calls) and one message here. Items of an assistant join
one turn until something comes that the turn has already.
"""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.shown import Parts, responses_picture
from areal.proxy.errors import bad_request
from areal.trajectory.meaning import Message, parse_arguments
from areal.trajectory.pictures import Album

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
PARTS = Parts(TEXT_PARTS, "input_image", responses_picture)
THOUGHT_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


def parse_input(body: dict[str, Any], album: Album | None) -> list[Message]:
    wire = body.get("input")
    if isinstance(wire, str):
        return [{"role": "user", "content": wire}]
    items = fields.objects(body, "input", "input")
    if not items:
        raise bad_request("input must be a text or hold at least one item, got none", "input")
    conversation = _Conversation(album)
    for place, item in enumerate(items):
        conversation.add(item, f"input[{place}]")
    return conversation.messages


class _Conversation:
    def __init__(self, album: Album | None) -> None:
        self._album = album
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The assistant's turn that further items may join."""
        self._said = False
        """That turn has a message already."""

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._join().setdefault("tool_calls", []).append(_tool_call(item, where))
        elif kind == "function_call_output":
            self._close()
            self.messages.append(_tool_result(item, where, self._album))
        elif kind == "reasoning":
            self._reasoning(item, where)
        else:
            raise bad_request(
                f"{where}.type must be message, function_call, function_call_output or reasoning, got {kind!r}", where
            )

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
        if role == "user":
            self._close()
            content = PARTS.content(item.get("content"), f"{where}.content", self._album)
            self.messages.append({"role": role, "content": content})
            return
        text = fields.content(item.get("content"), TEXT_PARTS, f"{where}.content")
        if role != "assistant":
            self._close()
            self.messages.append({"role": ROLES[role], "content": text})
            return
        if self._said:
            self._close()
        self._join()["content"] = text
        self._said = True

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        """Thinking is text here; what is encrypted elsewhere cannot be read and is no part of the conversation."""
        self._close()
        thought = fields.content(item.get("content") or item.get("summary") or [], THOUGHT_PARTS, f"{where}.content")
        if thought:
            self._join()["reasoning_content"] = thought

    def _join(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn

    def _close(self) -> None:
        self._turn, self._said = None, False


def _tool_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = parse_arguments(fields.text(item, "arguments", f"{where}.arguments"))
    name = fields.text(item, "name", f"{where}.name")
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(item: dict[str, Any], where: str, album: Album | None) -> Message:
    call_id = fields.text(item, "call_id", f"{where}.call_id")
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": PARTS.content(item.get("output"), f"{where}.output", album),
    }
