"""What computes a step of the package's decoder, and which of the two does: torch, or the kernel in C++."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from areal.api.errors import KernelUnavailable
from areal.api.messages import Array
from areal.config.rollout import Kernel
from areal.engine.inference.attention import SharedPrefix
from areal.engine.inference.kv_cache import KeyValueCache
from areal.engine.inference.model_runner import Piece
from areal.engine.inference.sampler import Sampled, SamplingParams
from areal.engine.inference.torch_kernel import TorchKernel
from areal.engine.model.decoder import Decoder
from areal.engine.native.kernel import NativeKernel
from areal.engine.native.library import load
from areal.utils.logging import getLogger

logger = getLogger("engine")


class StepKernel(Protocol):
    """Computes the next tokens' logits from the weights of a decoder and from the cache, which it fills."""

    name: str
    """Kernels of one name compute the same bits on one machine."""
    cache_dtype: torch.dtype
    reads_neighbours: bool
    """Whether it reads the rows of a pool together, which must have its first slots then."""
    fits_twice: bool
    """Whether it makes something of the weights, and there is room for that of the next version beside it."""

    def refresh(self) -> None:
        """The decoder's weights are new."""
        ...

    def prepare(self, decoder: Decoder) -> object:
        """What `adopt` takes once its own decoder has the weights of this one. May be called in another thread."""
        ...

    def adopt(self, prepared: object) -> None: ...

    def logits(
        self,
        cache: KeyValueCache,
        ids: Tensor,
        positions: Tensor,
        pieces: Sequence[Piece],
        shared: Sequence[SharedPrefix],
    ) -> Tensor:
        """Of one token for each of the first B rows, then of each last piece [.., V]; there is room for all."""
        ...

    def sample(
        self, logits: Tensor, params: SamplingParams, counts: Sequence[int] | Array, banned: Tensor | None = None
    ) -> Sampled:
        """As `sampler.sample`."""
        ...


def choose_kernel(setting: Kernel, decoder: Decoder, dtype: torch.dtype) -> StepKernel:
    """Raises KernelUnavailable if it must be the native one and cannot; `auto` then takes torch and says why."""
    if setting == "torch" or (setting == "auto" and decoder.flat.device.type != "cpu"):
        return TorchKernel(decoder, dtype)
    try:
        return NativeKernel(decoder, dtype)
    except KernelUnavailable as error:
        if setting == "native":
            raise
        logger.warning("the engine computes with torch, which is slower: %s", error)
        return TorchKernel(decoder, dtype)


def kernel_name(setting: Kernel, device: torch.device) -> str:
    """The name of the kernel that would be chosen for a model that it can compute; compiles it if it must."""
    if setting == "torch" or device.type != "cpu":
        return TorchKernel.name
    try:
        return load().name
    except KernelUnavailable:
        return TorchKernel.name
