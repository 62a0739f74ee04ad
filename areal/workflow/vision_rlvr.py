"""A question about images, one completion, one verifiable reward.

The images of a task become placeholder tokens by the model's own processor, as they do in the proxy.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal.api.engine_api import InferenceEngine
from areal.api.errors import WorkflowError
from areal.api.reward_api import AsyncRewardWrapper
from areal.config.rollout import GenerationHyperparameters
from areal.trajectory.message import Content, Image, ImageCache, Message, content_of, images_in
from areal.trajectory.rendering import Renderer
from areal.trajectory.tensors import tensors_of_response
from areal.utils.hf_utils import load_hf_processor
from areal.utils.images import ImageError, encode_image
from areal.workflow.rlvr import RLVRWorkflow

SOURCES = ("image_url", "image", "url", "path", "base64")
"""Keys under which a part holds its image, in the styles of OpenAI and of Hugging Face."""


class VisionRLVRWorkflow(RLVRWorkflow):
    """RLVRWorkflow for tasks with images, in the parts of `data["messages"]` or as a list in `data["images"]`.

    An image is a data URL, a path, encoded bytes or a PIL image. Those in `data["images"]` take the places of parts
    that are `{"type": "image"}` and no more, in order; without such parts, they come before the last user's text.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any = None,
    ) -> None:
        """`processor` None = the one in the tokenizer's directory."""
        self._processor = processor if processor is not None else _processor_of(tokenizer)
        super().__init__(reward_fn, gconfig, tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """The tensor dict of RLVRWorkflow, and `images`: a list of encoded bytes for each row."""
        messages = await asyncio.to_thread(self._messages_with_images, data)
        prompt, images = self._renderer.render(messages, None), images_in(messages)
        ids = await asyncio.to_thread(self._renderer.encode, prompt, images)
        encoded = [image.data for image in images]
        scored = await self._complete(engine, data, self._renderer.plain(prompt), ids, encoded)
        if scored is None:
            return None
        return {**tensors_of_response(*scored, self.gconfig.sampling_temperature), "images": [encoded]}

    def _open_renderer(self, tokenizer: Any) -> Renderer:
        return Renderer(tokenizer, processor=self._processor)

    def _messages_with_images(self, data: dict[str, Any]) -> list[Message]:
        assert self._renderer.image_processor is not None, "it was made with a processor"
        return _read_messages(self._messages(data), data.get("images") or (), self._renderer.image_processor.cache)


def _processor_of(tokenizer: Any) -> Any:
    directory = getattr(tokenizer, "name_or_path", "")
    processor = load_hf_processor(directory) if directory else None
    if processor is None:
        raise WorkflowError(
            "VisionRLVRWorkflow needs the processor of a model that takes images, and the tokenizer's directory "
            f"{directory!r} has none; pass processor=load_hf_processor(...)"
        )
    return processor


def _read_messages(messages: Sequence[dict[str, Any]], images: Sequence[Any], cache: ImageCache) -> list[Message]:
    """Messages with the images of their parts and those of `images` in their places. Reads files."""
    spare = iter(images)
    read = [_message(message, f"messages[{at}]", spare, cache) for at, message in enumerate(messages)]
    left = [_image(source, "images", cache) for source in spare]
    if not left:
        return read
    if len(left) < len(images):
        raise WorkflowError(
            f"a task must have a place for each of its images, got {len(images)} images and "
            f"{len(images) - len(left)} parts that are {{'type': 'image'}}"
        )
    return _before_last_question(read, left)


def _message(message: dict[str, Any], where: str, spare: Iterator[Any], cache: ImageCache) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    pieces = [_piece(part, f"{where}.content[{at}]", spare, cache) for at, part in enumerate(content)]
    return {**message, "content": content_of(pieces)}


def _piece(part: Any, where: str, spare: Iterator[Any], cache: ImageCache) -> str | Image:
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
        raise WorkflowError(f"{where} must hold an image, or the task another one in `images`, got neither")
    return _image(source, where, cache)


def _image(source: Any, where: str, cache: ImageCache) -> Image:
    try:
        return cache.get(encode_image(source))
    except ImageError as error:
        raise WorkflowError(f"{where}: {error}") from error


def _before_last_question(messages: list[Message], images: list[Image]) -> list[Message]:
    places = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise WorkflowError(
            f"a task with images must have a user's message to put them in, got {len(messages)} others; add one"
        )
    question = messages[places[-1]]
    with_images = {**question, "content": content_of([*images, *_pieces(question["content"])])}
    return [*messages[: places[-1]], with_images, *messages[places[-1] + 1 :]]


def _pieces(content: Content) -> list[str | Image]:
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part["image"] for part in content]
