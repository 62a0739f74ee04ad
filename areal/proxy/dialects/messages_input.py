"""The conversation of a Messages request, made plain. A turn there is a list of blocks; tool results are blocks of a
user's turn there, and messages of their own here."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.shown import Parts, messages_picture
from areal.proxy.errors import bad_request
from areal.trajectory.meaning import Message
from areal.trajectory.pictures import Album, Picture, content_of

TEXT_BLOCKS = {"text": "text"}
BLOCKS = Parts(TEXT_BLOCKS, "image", messages_picture)


def parse_system(body: dict[str, Any]) -> list[Message]:
    system = body.get("system")
    if system is None:
        return []
    return [{"role": "system", "content": fields.content(system, TEXT_BLOCKS, "system")}]


def parse_messages(body: dict[str, Any], album: Album | None) -> list[Message]:
    turns = fields.objects(body, "messages", "messages")
    if not turns:
        raise bad_request("messages must hold at least one message, got none", "messages")
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        messages += _turn(turn, f"messages[{place}]", album)
    if messages[-1]["role"] == "assistant":
        raise bad_request(
            "messages must not end with the assistant: an answer cannot be begun for the model; "
            "end with the user's message",
            "messages",
        )
    return messages


def _turn(turn: dict[str, Any], where: str, album: Album | None) -> list[Message]:
    role = turn.get("role")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be user or assistant, got {role!r}", f"{where}.role")
    content = turn.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = fields.objects(turn, "content", f"{where}.content")
    places = [(block, f"{where}.content[{place}]") for place, block in enumerate(blocks)]
    if role == "assistant":
        return [_answer(places)]
    return _user_turn(role, places, f"{where}.content", album if role == "user" else None)


def _answer(blocks: list[tuple[dict[str, Any], str]]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block, where in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] += fields.text(block, "text", where)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + fields.text(block, "thinking", where)
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_tool_call(block, where))
        else:
            raise bad_request(f"{where}.type must be text, tool_use or thinking, got {kind!r}", where)
    if not message.get("reasoning_content", "unset"):
        del message["reasoning_content"]
    return message


def _user_turn(role: str, blocks: list[tuple[dict[str, Any], str]], where: str, album: Album | None) -> list[Message]:
    """Texts and pictures beside each other are one message; every tool result is one of its own."""
    messages: list[Message] = []
    said: list[str | Picture] = []
    for block, place in blocks:
        if block.get("type") == "tool_result":
            messages += _said(role, said)
            messages.append(_tool_result(block, place, album))
            said = []
        else:
            said.append(BLOCKS.part(block, place, album))
    messages += _said(role, said)
    if not messages:
        raise bad_request(f"{where} must be text or a list of blocks, got none", where)
    return messages


def _said(role: str, said: list[str | Picture]) -> list[Message]:
    return [{"role": role, "content": content_of(said)}] if said else []


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name = fields.text(block, "name", f"{where}.name")
    arguments = fields.mapping(block, "input", f"{where}.input")
    call_id = fields.text(block, "id", f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: dict[str, Any], where: str, album: Album | None) -> Message:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": fields.text(block, "tool_use_id", f"{where}.tool_use_id"),
        "content": "" if content is None else BLOCKS.content(content, f"{where}.content", album),
    }
