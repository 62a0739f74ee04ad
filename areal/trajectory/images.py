"""A model's processor: text with a placeholder per picture, and the pictures, to token ids.

How many tokens a picture takes, and which, only the processor knows. Owns the memory of what it has worked out: the
answers to one task ask for the same prompt. Safe to be used from several threads.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from areal.api.errors import ModelError, RequestError
from areal.trajectory.message import Album, Picture
from areal.utils.images import MAX_PIXELS, ImageError, decode_image

REMEMBERED = 256
"""Prompts whose ids are kept."""
MOST_PIXELS = 4 * MAX_PIXELS
"""Of all pictures that are decoded at once; a few bytes can say that they are many."""
NAMES = ("image_token", "boi_token", "fake_image_token", "video_token", "audio_token")
"""What processors call the tokens that stand for something else than text."""

Key = tuple[str, tuple[bytes, ...]]


class ImageProcessor:
    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.album = Album()
        found = [getattr(processor, name, None) for name in NAMES]
        self._tokens = list(dict.fromkeys(token for token in found if isinstance(token, str) and token))
        self._mark = ""
        """The one that the chat template writes for a picture."""
        self._known: OrderedDict[Key, list[int]] = OrderedDict()
        self._lock = Lock()

    def find_mark(self, rendered: str) -> None:
        """Learn what the template writes for a picture, from a conversation with a single one."""
        self._mark = next((token for token in self._tokens if rendered.count(token) == 1), "")
        if not self._mark:
            raise ModelError(
                f"the chat template must write one of the processor's tokens {self._tokens} for a picture, "
                f"got {rendered!r:.200}; set a chat_template that does"
            )

    def check(self, text: str, pictures: Sequence[Picture]) -> None:
        """Text that looks like a picture would put the others in wrong places."""
        for token in self._tokens:
            wanted = len(pictures) if token == self._mark else 0
            if (found := text.count(token)) != wanted:
                raise RequestError(
                    f"{token!r} stands for what is no text, and the messages hold it {found} times for {wanted} "
                    "pictures; leave it out of the texts"
                )

    def encode(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        """Raises RequestError for a picture that is broken, or that the processor cannot show."""
        key = (text, tuple(picture.digest for picture in pictures))
        with self._lock:  # who asks for the same meanwhile finds it done
            if key in self._known:
                self._known.move_to_end(key)
            else:
                self._known[key] = self._process(text, pictures)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return list(self._known[key])

    def _process(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        pixels = sum(picture.facts.width * picture.facts.height for picture in pictures)
        if pixels > MOST_PIXELS:
            raise RequestError(f"the new pictures of a call may have {MOST_PIXELS} pixels, got {pixels}; shrink them")
        try:
            images = [decode_image(picture.data) for picture in pictures]
        except ImageError as error:
            raise RequestError(str(error)) from error
        try:
            features = self.processor(text=[text], images=images, add_special_tokens=False)
        except Exception as error:  # a processor is a program of the model's authors: it may raise anything
            raise RequestError(f"the model's processor refuses these pictures: {error}") from error
        return [int(token) for token in features["input_ids"][0]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.processor, self._mark)


def _restored(processor: Any, mark: str) -> ImageProcessor:
    sight = ImageProcessor(processor)
    sight._mark = mark
    return sight
