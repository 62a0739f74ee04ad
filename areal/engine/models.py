"""Find the model that a config names, and open it to generate or to train.

A model is `builtin:NAME`, a directory, or a Hugging Face id. This package's decoder computes the architectures it
knows; transformers computes all others.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from areal.api.errors import ModelError
from areal.config.errors import require
from areal.config.rollout import Kernel
from areal.engine.builtin.text import TINY_COUNTDOWN, TINY_MATH
from areal.engine.builtin.vision import tiny_vision
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.kernels import kernel_name
from areal.engine.inference.model_runner import ModelRunner
from areal.engine.model.architecture import Architecture, UnknownArchitecture, read_architecture
from areal.engine.model.decoder import Decoder, parameter_count
from areal.engine.model.device import find_device
from areal.engine.model.weights import load_weights
from areal.engine.training.engine import TrainableModel
from areal.engine.training.packing import PackedDecoder
from areal.utils.shorten import first_line

BUILTIN: dict[str, Callable[[Callable[[str], None]], Path]] = {
    "tiny-math": TINY_MATH.cached,
    "tiny-countdown": TINY_COUNTDOWN.cached,
    "tiny-vision": tiny_vision,
}


def find_model(path: str, report: Callable[[str], None] = lambda text: None) -> Path:
    """The directory of a model; a built-in one is made on first use, and `report` gets lines on its progress."""
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        if name not in BUILTIN:
            raise ModelError(f"no built-in model {name!r}; use one of {', '.join(BUILTIN)}")
        return BUILTIN[name](report)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(
            f"no model directory at {path!r}; set actor.path to one, to a Hugging Face id, or to builtin:tiny-math"
        )
    return _download(path)


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
        )
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        raise ModelError(
            f"no directory {model_id!r} here, and it cannot be downloaded from the model hub: {first_line(error)}"
        ) from None


def open_runner(
    directory: Path,
    dtype: str = "float32",
    device: str = "auto",
    *,
    kernel: Kernel = "auto",
    with_weights: bool = True,
) -> ModelRunner:
    """The model of a directory, to generate with, computed in `dtype` on `device`; `kernel` as `rollout.kernel`.

    Without weights it is good for nothing until some are published to it.
    """
    place = find_device(device, "rollout.device")
    architecture = _known(directory)
    if architecture is not None:
        # On a device there is room for one copy of the weights; on a CPU the float32 ones stay, to be hashed.
        held = torch.float32 if place.type == "cpu" else getattr(torch, dtype)
        decoder = Decoder(architecture, torch.zeros(parameter_count(architecture), dtype=held, device=place))
        if with_weights:
            load_weights(decoder, directory)
        return DecoderRunner(decoder, dtype=getattr(torch, dtype), kernel=kernel)
    require(
        kernel != "native",
        f"{directory.name} is computed by transformers, got rollout.kernel=native; leave it out",
    )
    require(
        dtype == "float32",
        f"{directory.name} is computed by transformers in float32, got rollout.dtype={dtype}; leave it out",
    )
    from areal.engine.transformers.model import TransformersModel
    from areal.engine.transformers.runner import TransformersRunner, may_cache

    model = TransformersModel(directory, device=place, with_weights=with_weights)
    return TransformersRunner(model, caches=may_cache(model))


def open_trainable(
    directory: Path,
    *,
    gradient_checkpointing: bool = False,
    device: str = "auto",
    frozen: bool = False,
    value_head: bool = False,
) -> TrainableModel:
    """The model of a directory, to train on `device`; a frozen one computes log-probs and has no gradient.

    With a value head it is a critic, and gives values where a policy gives log-probs.
    """
    place = find_device(device, "actor.device")
    architecture = _known(directory)
    if architecture is not None:
        decoder = PackedDecoder(
            replace(architecture, value_head=value_head),
            gradient_checkpointing=gradient_checkpointing,
            device=place,
            frozen=frozen,
        )
        decoder.load(directory)
        return decoder
    require(
        not gradient_checkpointing,
        f"{directory.name} is computed by transformers, where actor.gradient_checkpointing would switch dropout on; "
        "leave it out, and lower actor.max_tokens_per_mb to save memory",
    )
    from areal.engine.transformers.model import TransformersModel
    from areal.engine.transformers.training import TransformersTraining

    return TransformersTraining(TransformersModel(directory, trainable=not frozen, device=place, value_head=value_head))


def sampling_kernel(directory: Path, kernel: Kernel, device: str) -> str:
    """What computes an embedded engine's steps with this model and these settings; it decides their last bits."""
    if _known(directory) is None:
        return "transformers"
    return kernel_name(kernel, find_device(device, "rollout.device"))


def max_positions(directory: Path) -> int:
    """How many tokens a sequence may have."""
    architecture = _known(directory)
    if architecture is not None:
        return architecture.max_positions
    from areal.engine.transformers.model import positions_of, read_config

    return positions_of(read_config(directory))


def vocab_size(directory: Path) -> int:
    """How many tokens the model knows, those that no text has included."""
    architecture = _known(directory)
    if architecture is not None:
        return architecture.vocab_size
    from areal.engine.transformers.model import read_config

    return int(read_config(directory).get_text_config().vocab_size)


def _known(directory: Path) -> Architecture | None:
    try:
        return read_architecture(directory)
    except UnknownArchitecture:
        return None
