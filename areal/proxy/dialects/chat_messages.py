"""Messages as Chat Completions writes them, made plain: what the trajectory calls a `Message`."""

from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.dialects.shown import Parts, chat_picture
from areal.proxy.errors import bad_request
from areal.trajectory.meaning import Message, parse_arguments
from areal.trajectory.pictures import Album, Content

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""`developer` is a newer name for `system`, which is the one that chat templates know."""

PARTS = Parts({"text": "text", "refusal": "refusal"}, "image_url", chat_picture)

SHOWN_PICTURES = ("user", "tool")


def parse_messages(body: dict[str, Any], album: Album | None) -> list[Message]:
    messages = fields.objects(body, "messages", "messages")
    if not messages:
        raise bad_request("messages must hold at least one message, got none", "messages")
    return [_message(message, f"messages[{place}]", album) for place, message in enumerate(messages)]


def _message(wire: dict[str, Any], where: str, album: Album | None) -> Message:
    role = wire.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", f"{where}.role")
    message: Message = {"role": ROLES[role], "content": _content(wire, where, album)}
    if calls := fields.objects(wire, "tool_calls", f"{where}.tool_calls"):
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    if wire.get("function_call") is not None:
        raise bad_request(f"{where}.function_call is not supported; use tool_calls", f"{where}.function_call")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if wire.get(name) is not None:
            message[name] = fields.text(wire, name, f"{where}.{name}")
    return message


def _content(wire: dict[str, Any], where: str, album: Album | None) -> Content:
    content = wire.get("content")
    if content is None and wire["role"] in ("assistant", "tool"):
        return ""
    if wire["role"] not in SHOWN_PICTURES:
        return fields.content(content, PARTS.texts, f"{where}.content")
    return PARTS.content(content, f"{where}.content", album)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function must be an object, got {function!r}", where)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{where}.function.arguments must be text, got {arguments!r:.200}", where)
    name = fields.text(function, "name", f"{where}.function.name")
    named = call.get("id")
    return {
        "id": named if isinstance(named, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": parse_arguments(arguments)},
    }
