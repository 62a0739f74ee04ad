"""The messages of a task that shows pictures, made plain: whatever holds a picture becomes its encoded bytes."""

# MERGED-DOC
# A question about pictures, one completion, one verifiable reward.
#
# The pictures of a task become placeholder tokens by the model's own processor, as they do in the proxy.

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.api.reward_api import AsyncRewardWrapper
from areal.config.rollout import GenerationHyperparameters
from areal.trajectory.message import Album, Content, Message, Picture, content_of, pictures_in
from areal.trajectory.rendering import Renderer
from areal.utils.hf_utils import load_hf_processor
from areal.utils.images import ImageError, encode_image
from areal.workflow.rlvr import RLVRWorkflow

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


class VisionRLVRWorkflow(RLVRWorkflow):
    """RLVRWorkflow for tasks with pictures, in the parts of `data["messages"]` or as a list in `data["images"]`.

    A picture is a data URL, a path, encoded bytes or a PIL image. Those in `data["images"]` take the places of parts
    that are `{"type": "image"}` and no more, in order; where there are none, they come before the last user's text.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any = None,
    ) -> None:
        """`processor` None = that of the tokenizer's directory."""
        self._processor = processor if processor is not None else _processor_of(tokenizer)
        super().__init__(reward_fn, gconfig, tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """A row as RLVRWorkflow's, and its pictures: `images`, a list of encoded bytes for each row."""
        messages = await asyncio.to_thread(self._shown, data)
        prompt, pictures = self._renderer.render(messages, None), pictures_in(messages)
        ids = await asyncio.to_thread(self._renderer.encode, prompt, pictures)
        images = [picture.data for picture in pictures]
        row = await self._complete(engine, data, prompt, ids, images)
        return None if row is None else {**row, "images": [images]}

    def _open_renderer(self, tokenizer: Any) -> Renderer:
        return Renderer(tokenizer, processor=self._processor)

    def _shown(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._renderer.sight is not None, "it was made with a processor"
        return read_messages(self._messages(data), data.get("images") or (), self._renderer.sight.album)


def _processor_of(tokenizer: Any) -> Any:
    directory = getattr(tokenizer, "name_or_path", "")
    processor = load_hf_processor(directory) if directory else None
    if processor is None:
        raise WorkflowError(
            f"VisionRLVRWorkflow needs the processor of a model that sees pictures, and the tokenizer's directory "
            f"{directory!r} has none; pass processor=load_hf_processor(...)"
        )
    return processor
