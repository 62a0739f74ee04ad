"""Content that may show pictures. They come with the request: no file of this machine is read, nothing is fetched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal.proxy.dialects import fields
from areal.proxy.errors import bad_request
from areal.trajectory.pictures import Album, Content, Picture, content_of
from areal.utils.images import ImageError, read_base64, read_data_url


@dataclass(frozen=True)
class Parts:
    """How a dialect writes the parts of content."""

    texts: Mapping[str, str]
    """Types of texts, and the key under which each has it."""
    picture: str
    """The type of pictures."""
    read: Callable[[dict[str, Any], str], bytes]
    """The bytes of such a part, given where it stands. Raises ImageError or ApiError."""

    def content(self, value: Any, where: str, album: Album | None) -> Content:
        """Text, or a list of parts; without an album, of texts only. Raises ApiError 400 naming the part."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise bad_request(f"{where} must be text or a list of parts, got {value!r:.200}", where)
        return content_of([self.part(part, f"{where}[{place}]", album) for place, part in enumerate(value)])

    def part(self, part: Any, where: str, album: Album | None) -> str | Picture:
        if not isinstance(part, dict) or part.get("type") != self.picture:
            return fields.part(part, self.texts, where, "" if album is None else f" or {self.picture}")
        if album is None:
            text = next(iter(self.texts))
            raise bad_request(f"{where}.type must be {text}: this model sees no pictures, got {self.picture!r}", where)
        try:
            return album.picture(self.read(part, where))
        except ImageError as error:
            raise bad_request(f"{where}: {error}", where) from None


def chat_picture(part: dict[str, Any], where: str) -> bytes:
    """`detail` is a wish to hosted models: the model's own processor decides how it is shown."""
    return read_data_url(fields.text(fields.mapping(part, "image_url", where), "url", f"{where}.image_url.url"))


def responses_picture(part: dict[str, Any], where: str) -> bytes:
    if part.get("file_id") is not None:
        raise bad_request(f"{where}.file_id is not supported; send image_url with a data URL", where)
    return read_data_url(fields.text(part, "image_url", f"{where}.image_url"))


def messages_picture(block: dict[str, Any], where: str) -> bytes:
    source = fields.mapping(block, "source", f"{where}.source")
    if source.get("type") != "base64":
        raise bad_request(
            f"{where}.source.type must be base64: nothing is downloaded here, got {source.get('type')!r}", where
        )
    return read_base64(fields.text(source, "data", f"{where}.source.data"))
