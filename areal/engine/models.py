"""Find the model that a config names, and open it to generate or to train.

A model is `builtin:NAME`, a directory, or a Hugging Face id. This package's decoder computes the architectures it
knows; transformers computes all others. A directory may also have an adapter alone, which is added to the model that it
names: such a model generates, and `merge_adapter` makes an ordinary one of it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from areal.api.errors import ModelError
from areal.config.errors import require
from areal.config.rollout import Kernel
from areal.config.training import LoraConfig
from areal.engine.builtin.text import TINY_COUNTDOWN, TINY_MATH
from areal.engine.builtin.vision import tiny_vision, write_untrained
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.kernels import kernel_name
from areal.engine.inference.model_runner import ModelRunner
from areal.engine.model.adapter import base_digest, base_of, is_adapter, merged_weight, open_adapter
from areal.engine.model.architecture import Architecture, UnknownArchitecture, read_architecture
from areal.engine.model.decoder import Decoder, parameter_count
from areal.engine.model.device import find_device
from areal.engine.model.live import HoldsWeights
from areal.engine.model.weights import load_weights
from areal.engine.model_path import Report, builtin_name, model_directory
from areal.engine.training.lora import Adaptable, AdaptedModel
from areal.engine.training.packing import PackedDecoder
from areal.utils.shorten import first_line

BUILTIN: dict[str, Callable[[Report], Path]] = {
    "tiny-math": TINY_MATH.cached,
    "tiny-countdown": TINY_COUNTDOWN.cached,
    "tiny-vision": tiny_vision,
}
DESCRIBED: dict[str, Callable[[Path], None]] = {
    "tiny-math": TINY_MATH.describe,
    "tiny-countdown": TINY_COUNTDOWN.describe,
    "tiny-vision": write_untrained,
}
"""What writes the files that tell a built-in model's size, without making it."""


def find_model(path: str, report: Report = lambda text, share: None) -> Path:
    """The directory of a model; a built-in one is made on first use, and `report` gets lines on its progress."""
    name = builtin_name(path)
    if name is not None:
        return BUILTIN[name](report)
    directory = model_directory(path)
    return _download(path) if directory is None else directory


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

    Without weights it is good for nothing until some are published to it. An adapter's model is opened with the adapter
    merged into it.
    """
    if is_adapter(directory):
        runner = open_runner(find_model(base_of(directory)), dtype, device, kernel=kernel)
        _merge(directory, runner)
        return runner
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
) -> Adaptable:
    """The model of a directory, to train on `device`; a frozen one computes log-probs and has no gradient.

    With a value head it is a critic, and gives values where a policy gives log-probs.
    """
    require_model(directory)
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


def open_adapted(
    directory: Path,
    lora: LoraConfig,
    *,
    name: str,
    seed: int,
    gradient_checkpointing: bool = False,
    device: str = "auto",
) -> AdaptedModel:
    """The model of a directory, of which an adapter is trained. `name`: what a config calls the model."""
    base = open_trainable(directory, gradient_checkpointing=gradient_checkpointing, device=device, frozen=True)
    return AdaptedModel(base, lora, seed=seed, base_name=portable_name(name, directory))


def portable_name(name: str, directory: Path) -> str:
    """What the files of an adapter call its model, which people and PEFT look for from another directory."""
    return str(directory.resolve()) if Path(name).expanduser().is_dir() else name


def require_model(directory: Path) -> None:
    """Raises ModelError for an adapter, which is no model by itself."""
    if is_adapter(directory):
        raise ModelError(
            f"{str(directory)!r} holds an adapter to {base_of(directory)}, not a model; name that model and set "
            "actor.lora.path to this directory, or make a model of both with areal merge"
        )


def merge_adapter(directory: Path, out: Path) -> None:
    """Write the model of an adapter with the adapter added to its weights, as an ordinary model without tokenizer."""
    model = open_trainable(find_model(base_of(directory)), device="cpu", frozen=True)
    _merge(directory, model)
    out.mkdir(parents=True, exist_ok=True)
    model.save(out)


def _merge(directory: Path, model: HoldsWeights) -> None:
    adapter = open_adapter(directory)
    if adapter.base_digest is not None:
        adapter.require_base(base_digest(model.named_weights()))
    linear = dict(model.linear_weights())
    with torch.no_grad():
        for layer, matrices in adapter.layers(linear.items()).items():
            weight = linear[f"{layer}.weight"]
            weight.copy_(merged_weight(weight, matrices, adapter.config.scale))


def tokenizer_files(directory: Path) -> Path:
    """Where the tokenizer of a model is; an adapter that has none beside it uses its model's."""
    if is_adapter(directory) and not (directory / "tokenizer_config.json").exists():
        return find_model(base_of(directory))
    return directory


def sampling_kernel(directory: Path, kernel: Kernel, device: str) -> str:
    """What computes an embedded engine's steps with this model and these settings; it decides their last bits."""
    if _known(directory) is None:
        return "transformers"
    return kernel_name(kernel, find_device(device, "rollout.device"))


def max_positions(directory: Path) -> int:
    """How many tokens a sequence may have."""
    directory = _model_of(directory)
    architecture = _known(directory)
    if architecture is not None:
        return architecture.max_positions
    from areal.engine.transformers.model import positions_of, read_config

    return positions_of(read_config(directory))


def vocab_size(directory: Path) -> int:
    """How many tokens the model knows, those that no text has included."""
    directory = _model_of(directory)
    architecture = _known(directory)
    if architecture is not None:
        return architecture.vocab_size
    from areal.engine.transformers.model import read_config

    return int(read_config(directory).get_text_config().vocab_size)


def _model_of(directory: Path) -> Path:
    """The directory itself, or of an adapter, that of its model."""
    return find_model(base_of(directory)) if is_adapter(directory) else directory


def _known(directory: Path) -> Architecture | None:
    try:
        return read_architecture(directory)
    except UnknownArchitecture:
        return None
