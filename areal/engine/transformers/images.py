"""Encoded images to the tensors that a model takes, by the model's own processor. Recent results are cached."""

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
from areal.engine.model.device import CPU, to_device
from areal.utils.bounded_cache import BoundedCache
from areal.utils.hf_utils import load_hf_processor
from areal.utils.images import ImageError, decode_image, encode_image

Images = tuple[bytes, ...]

CACHED_BYTES = 1 << 28
"""Of prepared images: the answers to one task all have the same."""
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class ImageInputs:
    def __init__(self, directory: Path, placeholders: set[int], device: torch.device = CPU) -> None:
        """`placeholders` are the tokens that stand for parts of an image; batches are made on `device`.

        Prepared images stay on the host.
        """
        self._directory = directory
        self._device = device
        self._placeholders = sorted(placeholders)
        self._processor: Any = None
        self._prepared: BoundedCache[bytes, PreparedImages] = BoundedCache(
            CACHED_BYTES, lambda prepared: prepared.bytes
        )

    def check(self, ids: Sequence[int] | Array, images: Images) -> None:
        """Raise RequestError unless `ids` have the placeholders of `images`."""
        found, wanted = (self._count(each) for each in (ids, self.of(images).ids if images else ()))
        if found != wanted:
            raise RequestError(
                f"{len(images)} images need {wanted} placeholder tokens, input_ids hold {found}; "
                "let the model's processor expand them"
            )

    def of(self, images: Images) -> "PreparedImages":
        """The images of one sequence. Raises RequestError for bytes that are not an image."""
        key = _digest(images)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(images)
            self._prepared.put(key, prepared)
        return prepared

    def shape(self, images: Images) -> tuple[Any, ...]:
        return self.of(images).shape if images else ()

    def batch(self, images: Sequence[Images]) -> dict[str, Tensor]:
        """The inputs of a batch, in the order of its sequences; those that have images share a shape."""
        prepared = [self.of(each).inputs for each in images if each]
        joined = {name: torch.cat([inputs[name] for inputs in prepared]) for name in prepared[0]}
        return {name: to_device(tensor, self._device) for name, tensor in joined.items()}

    def example(self) -> tuple[list[int], Images]:
        """The ids that stand for an image in a sequence, and the image."""
        from PIL import Image

        images = (encode_image(Image.linear_gradient("L")),)
        return self.of(images).ids, images

    def _prepare(self, images: Images) -> "PreparedImages":
        try:
            decoded = [decode_image(image) for image in images]
        except ImageError as error:
            raise RequestError(str(error)) from None
        processor = self._loaded()
        mark = getattr(processor, "boi_token", None) or processor.image_token
        try:
            made = processor(text=[mark * len(images)], images=decoded, return_tensors="pt")
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise RequestError(f"the model's processor refuses these images: {error}") from None
        inputs = {name: value for name, value in made.items() if name not in _TEXT_INPUTS}
        return PreparedImages(inputs, made["input_ids"][0].tolist())

    def _count(self, ids: Sequence[int] | Array) -> int:
        return int(np.isin(ids, self._placeholders).sum())

    def _loaded(self) -> Any:
        """The processor, loaded with the first image: a model may be used for text alone."""
        if self._processor is None:
            try:
                self._processor = load_hf_processor(self._directory)
            except ValueError as error:
                raise ModelError(str(error)) from error
            if self._processor is None:
                raise ModelError(f"the model in {str(self._directory)!r} takes images but has no processor for them")
        return self._processor


@dataclass(frozen=True)
class PreparedImages:
    inputs: dict[str, Tensor]
    ids: list[int]
    """The tokens that stand for the images in a sequence."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sequences of the same shape can be computed together."""
        return tuple((name, tensor.shape[1:]) for name, tensor in sorted(self.inputs.items()))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


def _digest(images: Images) -> bytes:
    hashed = blake2b(digest_size=16)
    for image in images:
        hashed.update(len(image).to_bytes(8))
        hashed.update(image)
    return hashed.digest()
