"""Encoded pictures to what the model takes, by its own processor. What was worked out last is remembered."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api.errors import ModelError, RequestError
from areal.api.messages import Array
from areal.utils.hf_utils import load_hf_processor
from areal.utils.images import ImageError, decode_image, encode_image

Images = tuple[bytes, ...]

REMEMBERED_BYTES = 1 << 28
"""Inputs that are kept: the answers to one task all see the same."""
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Prepared:
    inputs: dict[str, Tensor]
    ids: list[int]
    """What stands for the pictures in a sequence."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """Rows of the same shape can be computed together."""
        return tuple((name, tensor.shape[1:]) for name, tensor in sorted(self.inputs.items()))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


class PictureInputs:
    def __init__(self, directory: Path, placeholders: set[int]) -> None:
        self._directory = directory
        self._placeholders = sorted(placeholders)
        self._processor: Any = None
        self._known: OrderedDict[bytes, Prepared] = OrderedDict()
        self._bytes = 0

    def check(self, ids: Sequence[int] | Array, images: Images) -> None:
        """Raises RequestError unless `ids` have a place for each part of `images`."""
        found, wanted = (self._count(each) for each in (ids, self.of(images).ids if images else ()))
        if found != wanted:
            raise RequestError(
                f"{len(images)} pictures need {wanted} placeholder tokens, input_ids hold {found}; "
                "let the model's processor expand them"
            )

    def of(self, images: Images) -> Prepared:
        """The inputs of one sequence's pictures. Raises RequestError for what is no picture."""
        key = _digest(images)
        if key in self._known:
            self._known.move_to_end(key)
        else:
            self._remember(key, self._prepare(images))
        return self._known[key]

    def shape(self, images: Images) -> tuple[Any, ...]:
        return self.of(images).shape if images else ()

    def batch(self, images: Sequence[Images]) -> dict[str, Tensor]:
        """The inputs of a batch, in the order of its sequences; those that have pictures share a shape."""
        prepared = [self.of(each).inputs for each in images if each]
        return {name: torch.cat([inputs[name] for inputs in prepared]) for name in prepared[0]}

    def example(self) -> tuple[list[int], Images]:
        """A picture, and what stands for it in a sequence."""
        from PIL import Image

        images = (encode_image(Image.linear_gradient("L")),)
        return self.of(images).ids, images

    def _remember(self, key: bytes, prepared: Prepared) -> None:
        self._known[key] = prepared
        self._bytes += prepared.bytes
        while self._bytes > REMEMBERED_BYTES and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].bytes

    def _prepare(self, images: Images) -> Prepared:
        try:
            pictures = [decode_image(image) for image in images]
        except ImageError as error:
            raise RequestError(str(error)) from None
        processor = self._loaded()
        mark = getattr(processor, "boi_token", None) or processor.image_token
        try:
            made = processor(text=[mark * len(images)], images=pictures, return_tensors="pt")
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise RequestError(f"the model's processor refuses these pictures: {error}") from None
        inputs = {name: value for name, value in made.items() if name not in TEXT_INPUTS}
        return Prepared(inputs, made["input_ids"][0].tolist())

    def _count(self, ids: Sequence[int] | Array) -> int:
        return int(np.isin(ids, self._placeholders).sum())

    def _loaded(self) -> Any:
        """Loaded when the first picture comes: a model may be used for text alone."""
        if self._processor is None:
            try:
                self._processor = load_hf_processor(self._directory)
            except ValueError as error:
                raise ModelError(str(error)) from error
            if self._processor is None:
                raise ModelError(f"the model in {str(self._directory)!r} sees pictures but has no processor for them")
        return self._processor


def _digest(images: Images) -> bytes:
    hashed = blake2b(digest_size=16)
    for image in images:
        hashed.update(len(image).to_bytes(8))
        hashed.update(image)
    return hashed.digest()
