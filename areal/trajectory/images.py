"""The model's image processor: text with a placeholder per image, and the images, to token ids.

Only the processor knows how many tokens an image takes, and which. What it worked out is remembered, because the
samples of a group ask for the same prompt. Safe to use from several threads.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

from areal.api.errors import ModelError, RequestError
from areal.trajectory.message import Image, ImageCache
from areal.utils.bounded_cache import BoundedCache
from areal.utils.images import MAX_PIXELS, ImageError, decode_image

MAX_REMEMBERED_PROMPTS = 256
MAX_PIXELS_PER_CALL = 4 * MAX_PIXELS
"""Of all images that are decoded at once: a few bytes can unpack to many pixels."""
TOKEN_NAMES = ("image_token", "boi_token", "fake_image_token", "video_token", "audio_token")
"""What processors call the tokens that stand for something other than text."""


class ImageProcessor:
    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.cache = ImageCache()
        """The images of every conversation that uses this processor, each held once."""
        found = [getattr(processor, name, None) for name in TOKEN_NAMES]
        self._tokens = list(dict.fromkeys(token for token in found if isinstance(token, str) and token))
        self._placeholder = ""
        """The one of them that the chat template writes for an image."""
        self._ids: BoundedCache[tuple[str, tuple[bytes, ...]], list[int]] = BoundedCache(MAX_REMEMBERED_PROMPTS)
        self._lock = Lock()

    def find_placeholder(self, rendered: str) -> None:
        """Learn what the chat template writes for an image, from a conversation with a single one."""
        self._placeholder = next((token for token in self._tokens if rendered.count(token) == 1), "")
        if not self._placeholder:
            raise ModelError(
                f"the chat template must write one of the processor's tokens {self._tokens} for an image, "
                f"got {rendered!r:.200}; set a chat_template that does"
            )

    def check(self, text: str, images: Sequence[Image]) -> None:
        """Refuse text that contains a placeholder of its own, which would put the images in wrong places, and more
        pixels than may be decoded for one call."""
        pixels = sum(image.facts.width * image.facts.height for image in images)
        if pixels > MAX_PIXELS_PER_CALL:
            raise RequestError(
                f"the new images of a call may have {MAX_PIXELS_PER_CALL} pixels, got {pixels}; shrink them"
            )
        for token in self._tokens:
            expected = len(images) if token == self._placeholder else 0
            if (found := text.count(token)) != expected:
                raise RequestError(
                    f"{token!r} is reserved for what is not text, and the messages hold it {found} times for "
                    f"{expected} images; leave it out of the texts"
                )

    def encode(self, text: str, images: Sequence[Image]) -> list[int]:
        """Raises RequestError for an image that is broken, or that the processor refuses."""
        key = (text, tuple(image.digest for image in images))
        with self._lock:  # held while processing: concurrent callers wait for this result
            ids = self._ids.get(key)
            if ids is None:
                ids = self._process(text, images)
                self._ids.put(key, ids)
            return list(ids)

    def fill(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """The ids with each placeholder, a single token so far, replaced by the tokens of its image."""
        placeholder = self.processor.tokenizer.convert_tokens_to_ids(self._placeholder)
        waiting = iter(images)
        filled: list[int] = []
        for token in ids:
            filled += self.encode(self._placeholder, [next(waiting)]) if token == placeholder else [token]
        return filled

    def _process(self, text: str, images: Sequence[Image]) -> list[int]:
        try:
            decoded = [decode_image(image.data) for image in images]
        except ImageError as error:
            raise RequestError(str(error)) from error
        try:
            features = self.processor(text=[text], images=decoded, add_special_tokens=False)
        except Exception as error:  # a processor is a program of the model's authors: it may raise anything
            raise RequestError(f"the model's processor refuses these images: {error}") from error
        return [int(token) for token in features["input_ids"][0]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.processor, self._placeholder)


def _restore(processor: Any, placeholder: str) -> ImageProcessor:
    restored = ImageProcessor(processor)
    restored._placeholder = placeholder
    return restored
