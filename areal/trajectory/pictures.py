"""Pictures in messages. A message with pictures has a list of parts as its content, one without has text.

A part is {"type": "text", "text"} or {"type": "image", "image": Picture}. Texts beside each other are one part, so that
what means the same is the same.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

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
