"""Pictures in messages. A message with pictures has a list of parts as its content, one without has text.

A part is {"type": "text", "text"} or {"type": "image", "image": Picture}. Texts beside each other are one part, so that
what means the same is the same.
"""

# MERGED-DOC
# What a message means, whatever its spelling: the identity by which a conversation that comes back is recognised.
#
# Clients send turns back changed (null content as "", keys in another order, `None` fields added, thinking left out). Two
# messages mean the same if role, content, tool names and parsed tool arguments agree; a tool result also points at the
# same call. Pictures agree where their bytes do. Call ids are names for places in the conversation, not meaning: a result
# is identified by the place of the call it answers. An assistant's thinking is no part of the identity, because many
# clients drop it; where one is sent back it must be the recorded one.

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import orjson

from areal.utils.images import inspect_image

Content = str | list[dict[str, Any]]


class Picture:
    """Encoded bytes that are compared by their digest, which is taken once."""

    def __init__(self, data: bytes, digest: bytes | None = None) -> None:
        """Raises ImageError."""
        self.data = data
        self.digest = blake2b(data, digest_size=16).digest() if digest is None else digest
        self.facts = inspect_image(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"[image {self.facts}]"


class Album:
    """Hands out one Picture for the same bytes, as long as somebody holds it: conversations repeat theirs."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()

    def picture(self, data: bytes) -> Picture:
        """Raises ImageError."""
        digest = blake2b(data, digest_size=16).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = Picture(data, digest)
        return known

    def __reduce__(self) -> tuple[type["Album"], tuple[()]]:
        return Album, ()


def content_of(said: Iterable[str | Picture]) -> Content:
    """The content of a message that says and shows this, in this order."""
    parts: list[dict[str, Any]] = []
    for each in said:
        if isinstance(each, Picture):
            parts.append({"type": "image", "image": each})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += each
        elif each:
            parts.append({"type": "text", "text": each})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def pictures_in(messages: Sequence[dict[str, Any]]) -> list[Picture]:
    """In the order in which they are shown."""
    shown = (message["content"] for message in messages if isinstance(message["content"], list))
    return [part["image"] for content in shown for part in content if _is_shown(part)]


def text_of(content: Content) -> str:
    """Content as a person reads it: pictures are named."""
    if not isinstance(content, list):
        return content
    return "".join(repr(part["image"]) if _is_shown(part) else str(part.get("text", part)) for part in content)


def readable(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text."""
    return {**message, "content": text_of(message["content"])}


def identity(content: Content) -> Any:
    """Content for a digest: pictures by theirs."""
    if not isinstance(content, list):
        return content
    return [[part["image"].digest.hex()] if _is_shown(part) else part for part in content]


def _is_shown(part: dict[str, Any]) -> bool:
    return isinstance(part.get("image"), Picture)


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
