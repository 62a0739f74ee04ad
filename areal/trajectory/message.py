"""What a message is: its content, the images in it, and the identity by which it is recognised when it comes back.

Clients send turns back changed (null content as "", keys in another order, `None` fields added, thinking left out). Two
messages are the same if role, content, tool names and parsed tool arguments agree; images agree if their bytes do. A
tool result also answers the same call, which it names by id: ids themselves do not count, only the place of the call in
the conversation. An assistant's thinking is not part of the identity, because many clients drop it; a client that sends
it back must send what was recorded (tree.py).
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import orjson

from areal.utils.images import inspect_image

Message = dict[str, Any]
"""role, content, and where they apply: tool_calls, tool_call_id, name, reasoning_content.
A tool call is {"id", "type": "function", "function": {"name", "arguments"}}, arguments parsed where they are JSON."""

Content = str | list[dict[str, Any]]
"""Text; with images, a list of parts {"type": "text", "text"} and {"type": "image", "image": Image}. Neighbouring texts
are one part, so that equal contents compare equal."""

Digest = bytes
"""Identifies a conversation: every message of it, in order."""
EMPTY: Digest = b""
"""The conversation without messages."""


class Image:
    """Encoded bytes that are compared by their digest, which is computed once."""

    def __init__(self, data: bytes, digest: bytes | None = None) -> None:
        """Raises ImageError."""
        self.data = data
        self.digest = _image_digest(data) if digest is None else digest
        self.facts = inspect_image(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"[image {self.facts}]"


class ImageCache:
    """One Image for the same bytes as long as any conversation holds it: clients send theirs with every call."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[bytes, Image] = WeakValueDictionary()

    def get(self, data: bytes) -> Image:
        """Raises ImageError."""
        digest = _image_digest(data)
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = Image(data, digest)
        return known

    def __reduce__(self) -> tuple[type["ImageCache"], tuple[()]]:
        return ImageCache, ()


def _image_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def content_of(pieces: Iterable[str | Image]) -> Content:
    """The content made of these texts and images, in this order."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Image):
            parts.append({"type": "image", "image": piece})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += piece
        elif piece:
            parts.append({"type": "text", "text": piece})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def images_in(messages: Sequence[Message]) -> list[Image]:
    """Every image of the messages, in order."""
    contents = (message["content"] for message in messages if isinstance(message["content"], list))
    return [part["image"] for content in contents for part in content if _is_image(part)]


def text_of(content: Content) -> str:
    """Content as a person reads it: an image is described."""
    if not isinstance(content, list):
        return content
    return "".join(repr(part["image"]) if _is_image(part) else str(part.get("text", part)) for part in content)


def readable(message: Message) -> Message:
    """The message with text as its content."""
    return {**message, "content": text_of(message["content"])}


def _is_image(part: dict[str, Any]) -> bool:
    return isinstance(part.get("image"), Image)


def parse_arguments(arguments: Any) -> Any:
    """A JSON object out of its text; any other text stays text, because repairing it would invent a call."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, ensure_ascii=False).encode()  # a lone surrogate is valid JSON but cannot be rendered
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def arguments_text(arguments: Any) -> str:
    """Tool arguments as the wire has them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def extend_digest(digest: Digest, message: Message, places: dict[str, str]) -> Digest:
    """The digest of a conversation with one more message; `places` says which call each tool-call id names."""
    calls = [
        [call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)]
        for call in message.get("tool_calls", ())
    ]
    role, content = message["role"], message["content"]
    if isinstance(content, list):
        content = [[part["image"].digest.hex()] if _is_image(part) else part for part in content]
    answered = message.get("tool_call_id")
    fields = [
        role,
        content,
        calls,
        None if answered is None else places.get(answered, answered),
        None if role == "assistant" else message.get("name"),
        None if role == "assistant" else message.get("reasoning_content"),
    ]
    return blake2b(digest + orjson.dumps(fields), digest_size=16).digest()


def same_words(one: str, other: str) -> bool:
    """Whether two texts differ in white space only."""
    return one == other or "".join(one.split()) == "".join(other.split())
