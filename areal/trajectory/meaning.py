"""What a message means, whatever its spelling: the identity by which a conversation that comes back is recognised.

Clients send turns back changed (null content as "", keys in another order, `None` fields added, thinking left out). Two
messages mean the same if role, content, tool names and parsed tool arguments agree; a tool result also points at the
same call. Pictures agree where their bytes do. Call ids are names for places in the conversation, not meaning: a result
is identified by the place of the call it answers. An assistant's thinking is no part of the identity, because many
clients drop it; where one is sent back it must be the recorded one.
"""

import json
from hashlib import blake2b
from typing import Any

import orjson

from areal.trajectory.pictures import identity

Message = dict[str, Any]
"""role, content (text; parts where there are pictures: pictures.py), and where they apply: tool_calls, tool_call_id,
name, reasoning_content.
A tool call is {"id", "type": "function", "function": {"name", "arguments"}}, arguments parsed where they are JSON."""

Digest = bytes
START: Digest = b""


def parse_arguments(arguments: Any) -> Any:
    """A JSON object out of its text; text that is none stays text, because repairing it would invent a call."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, ensure_ascii=False).encode()  # a lone surrogate is JSON, but no text that can be rendered
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def arguments_text(arguments: Any) -> str:
    """Tool arguments as the wire wants them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def extend(path: Digest, message: Message, places: dict[str, str]) -> Digest:
    """The digest of a path with one more message; `places` says which call each tool-call id names."""
    calls = [
        [call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)]
        for call in message.get("tool_calls", ())
    ]
    role = message["role"]
    answered = message.get("tool_call_id")
    fields = [
        role,
        identity(message["content"]),
        calls,
        None if answered is None else places.get(answered, answered),
        None if role == "assistant" else message.get("name"),
        None if role == "assistant" else message.get("reasoning_content"),
    ]
    return blake2b(path + orjson.dumps(fields), digest_size=16).digest()


def call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def same_words(one: str, other: str) -> bool:
    """Whether two texts differ in white space only."""
    return one == other or "".join(one.split()) == "".join(other.split())
