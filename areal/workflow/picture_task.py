"""The messages of a task that shows pictures, made plain: whatever holds a picture becomes its encoded bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

from areal.api.errors import WorkflowError
from areal.trajectory.meaning import Message
from areal.trajectory.pictures import Album, Content, Picture, content_of
from areal.utils.images import ImageError, encode_image

SOURCES = ("image_url", "image", "url", "path", "base64")
"""Keys under which parts hold their picture, in the styles of OpenAI and of Hugging Face."""


def read_messages(messages: Sequence[dict[str, Any]], images: Sequence[Any], album: Album) -> list[Message]:
    """Messages with the pictures of their parts and those of `images` in their places. Reads files."""
    spare = iter(images)
    plain = [_message(message, f"messages[{at}]", spare, album) for at, message in enumerate(messages)]
    left = [_picture(source, "images", album) for source in spare]
    if not left:
        return plain
    if len(left) < len(images):
        raise WorkflowError(
            f"a task must have a place for each of its images, got {len(images)} images and "
            f"{len(images) - len(left)} parts that are {{'type': 'image'}}"
        )
    return _before_last_question(plain, left)


def _message(message: dict[str, Any], where: str, spare: Iterator[Any], album: Album) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    said = [_part(part, f"{where}.content[{at}]", spare, album) for at, part in enumerate(content)]
    return {**message, "content": content_of(said)}


def _part(part: Any, where: str, spare: Iterator[Any], album: Album) -> str | Picture:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return str(part["text"])
    if kind not in ("image", "image_url"):
        raise WorkflowError(f"{where}.type must be text, image or image_url, got {kind!r}")
    source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    if isinstance(source, dict):
        source = source.get("url")
    if source is None:
        source = next(spare, None)
    if source is None:
        raise WorkflowError(f"{where} must hold a picture, or the task another one in `images`, got neither")
    return _picture(source, where, album)


def _picture(source: Any, where: str, album: Album) -> Picture:
    try:
        return album.picture(encode_image(source))
    except ImageError as error:
        raise WorkflowError(f"{where}: {error}") from error


def _before_last_question(messages: list[Message], pictures: list[Picture]) -> list[Message]:
    places = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise WorkflowError(
            f"a task with images must have a user's message to show them in, got {len(messages)} others"
        )
    question = messages[places[-1]]
    shown = {**question, "content": content_of([*pictures, *_said(question["content"])])}
    return [*messages[: places[-1]], shown, *messages[places[-1] + 1 :]]


def _said(content: Content) -> list[str | Picture]:
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part["image"] for part in content]
