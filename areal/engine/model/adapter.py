"""LoRA adapters: how they are published and saved, and how they are added to the weights of a model.

An adapter changes linear layers. Each of them then computes with W + lora_alpha/r · B A, where A has the shape [r, in]
and B the shape [out, r]. The published file has PEFT's names, with the fields of PEFT's adapter_config.json in its
metadata, and that file is beside it: a version's directory is one that PEFT and vLLM load. The metadata also has a
digest of the model that the adapter belongs to, since on any other it would give wrong tokens without an error.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ModelError, WeightMismatch
from areal.engine.model.device import CPU
from areal.engine.model.published import ADAPTER_NAME, NamedTensors, WeightReader, WeightWriter
from areal.utils.shorten import shown

CONFIG_NAME = "adapter_config.json"
_CONFIG, _BASE = "adapter_config", "base_digest"
"""Keys of the metadata."""
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_USED = {"r", "lora_alpha", "target_modules"}
_WITHOUT_EFFECT = {
    *("task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
    *("inference_mode", "lora_dropout", "ensure_weight_tying"),
    *("qalora_group_size", "megatron_core"),  # have values also where they are not used
}
"""Fields of PEFT's that do not change what a trained adapter computes."""
_USUAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the model that the adapter is added to
}

LowRank = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r] of one layer."""


@dataclass(frozen=True)
class AdapterConfig:
    """What PEFT's adapter_config.json says of an adapter, by its names there."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    """Ends of the names of the layers that it changes, e.g. q_proj."""

    def __post_init__(self) -> None:
        """Raises ModelError."""
        if not (type(self.r) is int and self.r >= 1):
            raise ModelError(f"an adapter's r must be an integer >= 1, got {self.r!r}")
        number = isinstance(self.lora_alpha, int | float) and not isinstance(self.lora_alpha, bool)
        if not (number and math.isfinite(self.lora_alpha)):
            raise ModelError(f"an adapter's lora_alpha must be a finite number, got {self.lora_alpha!r}")
        if not self.target_modules or not all(isinstance(name, str) and name for name in self.target_modules):
            raise ModelError(f"an adapter's target_modules must be names of layers, got {self.target_modules!r}")

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r

    def targets(self, layer: str) -> bool:
        return any(layer == end or layer.endswith(f".{end}") for end in self.target_modules)

    def to_json(self, **further: Any) -> str:
        fields = {"r": self.r, "lora_alpha": self.lora_alpha, "target_modules": [*self.target_modules]}
        return json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **fields, **further})

    @classmethod
    def from_json(cls, text: str) -> "AdapterConfig":
        """Raises ModelError for what is no such file, and for adapters that are computed in another way."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ModelError(f"{CONFIG_NAME} is not valid JSON: {error}") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("target_modules"), list):
            raise ModelError(f"{CONFIG_NAME} must have a list of target_modules")
        for key in sorted(raw.keys() - _USED - _WITHOUT_EFFECT):
            if raw[key] not in _USUAL.get(key, (None, False, [], {})):
                raise ModelError(
                    f"an adapter with {key}={shown(raw[key])} is not computed here; leave {key} at its default"
                )
        return cls(raw.get("r"), raw.get("lora_alpha"), tuple(raw["target_modules"]))  # type: ignore[arg-type]


def adapter_writer(
    directory: Path, config: AdapterConfig, layers: Mapping[str, LowRank], base: NamedTensors | str
) -> WeightWriter:
    """Writes versions of an adapter: `layers` by their name, e.g. model.layers.0.self_attn.q_proj, to the model `base`,
    or one of this `base_digest`.

    Each `write` reads what the matrices hold then. Raises ArealError if there is no room.
    """
    text = config.to_json()
    metadata = {_CONFIG: text, _BASE: base if isinstance(base, str) else base_digest(base)}
    return WeightWriter(directory, tensor_names(layers), layout="adapter", metadata=metadata, texts={CONFIG_NAME: text})


def tensor_names(layers: Mapping[str, LowRank]) -> list[tuple[str, Tensor]]:
    """The matrices by the names that PEFT gives them."""
    pairs = ((f"{_PREFIX}{layer}", matrices) for layer, matrices in layers.items())
    return [each for name, (a, b) in pairs for each in ((name + _A, a), (name + _B, b))]


def save_adapter(
    directory: Path, config: AdapterConfig, layers: Mapping[str, LowRank], *, base: str, digest: str
) -> None:
    """Write files that PEFT loads. `base` is what people call the model that it belongs to, `digest` its own."""
    tensors = {name: each.detach().to(CPU, copy=True).contiguous() for name, each in tensor_names(layers)}
    save_file(tensors, directory / ADAPTER_NAME, metadata={"format": "pt", _BASE: digest})
    text = config.to_json(base_model_name_or_path=base, inference_mode=True)
    (directory / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class SavedAdapter:
    """The files of one, by this package or by PEFT."""

    directory: Path
    config: AdapterConfig
    base: str
    """What the model that it belongs to is called; empty = the files do not say."""
    base_digest: str | None
    """Of that model; PEFT does not write it."""
    tensors: dict[str, Tensor]

    def layers(self, linear: NamedTensors) -> dict[str, LowRank]:
        """By layer, as they fit a model with these weights [out, in] of linear layers. Raises ModelError."""
        return _fitting(f"the adapter in {str(self.directory)!r}", self.config, dict(self.tensors), linear)

    def require_base(self, digest: str) -> None:
        """Raises ModelError if it was made for another model."""
        if self.base_digest not in (None, digest):
            raise ModelError(
                f"the adapter in {str(self.directory)!r} belongs to a model with the digest {self.base_digest}, this "
                f"one has {digest}; take the model that it was trained on: {self.base or 'its files do not name it'}"
            )


def is_adapter(directory: Path) -> bool:
    """Whether a directory has an adapter and not a model."""
    return (directory / CONFIG_NAME).exists() and not (directory / "config.json").exists()


def base_of(directory: Path) -> str:
    """What the model is called that the adapter in a directory belongs to. Raises ModelError if it does not say."""
    base = _read_config(directory)[1]
    if not base:
        raise ModelError(
            f"{directory / CONFIG_NAME} must name the model that the adapter belongs to, got no "
            "base_model_name_or_path; add it"
        )
    return base


def open_adapter(directory: Path) -> SavedAdapter:
    """Raises ModelError for files that are missing or damaged, and for adapters that are computed in another way."""
    config, base = _read_config(directory)
    path = directory / ADAPTER_NAME
    try:
        with safe_open(path, framework="pt") as file:
            digest = (file.metadata() or {}).get(_BASE)
            tensors = {name: file.get_tensor(name) for name in [*file.keys()]}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the adapter in {str(path)!r}: {error}") from None
    return SavedAdapter(directory, config, base, digest, tensors)


def _read_config(directory: Path) -> tuple[AdapterConfig, str]:
    try:
        text = (directory / CONFIG_NAME).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"no adapter in {str(directory)!r}: {CONFIG_NAME} cannot be read: {error.strerror}") from None
    config = AdapterConfig.from_json(text)
    return config, str(json.loads(text).get("base_model_name_or_path") or "")


@dataclass(frozen=True)
class Adapter:
    """One that was read and fits the model."""

    scale: float
    layers: dict[str, LowRank]
    """By the name of the layer's weight."""
    base_digest: str

    def merged(self, name: str, original: Tensor) -> Tensor:
        """The weight of a layer with what the adapter adds to it, computed in float32."""
        return merged_weight(original, self.layers[name], self.scale)


def merged_weight(original: Tensor, matrices: LowRank, scale: float) -> Tensor:
    """W + scale · B A, computed in float32."""
    a, b = (each.to(original.device, torch.float32) for each in matrices)
    return torch.addmm(original.float(), b, a, alpha=scale).to(original.dtype)


def read_adapter(reader: WeightReader, update: WeightUpdate, linear: NamedTensors) -> Adapter:
    """The adapter of an update, to a model with these weights [out, in] of linear layers. Raises WeightMismatch."""
    what = f"the adapter of version {update.version}"
    tensors, metadata = reader.open(update)
    if _CONFIG not in metadata or _BASE not in metadata:
        raise WeightMismatch(f"{what} must have {_CONFIG} and {_BASE} in its metadata, got {sorted(metadata)}")
    try:
        config = AdapterConfig.from_json(metadata[_CONFIG])
    except ModelError as error:
        raise WeightMismatch(f"{what}: {error}") from None
    try:
        layers = _fitting(what, config, tensors, linear)
    except ModelError as error:
        raise WeightMismatch(str(error)) from None
    return Adapter(config.scale, {f"{layer}.weight": pair for layer, pair in layers.items()}, metadata[_BASE])


def published_config(reader: WeightReader, update: WeightUpdate) -> str:
    """The text of adapter_config.json for the adapter of an update. Raises WeightMismatch."""
    _, metadata = reader.open(update)
    return metadata[_CONFIG]


def _fitting(what: str, config: AdapterConfig, tensors: dict[str, Tensor], linear: NamedTensors) -> dict[str, LowRank]:
    """The matrices of an adapter by layer. Raises ModelError unless they are those of a model with these layers."""
    layers = {}
    known = [(name.removesuffix(".weight"), weight.shape) for name, weight in linear]
    for layer, (rows, columns) in known:
        if config.targets(layer):
            a = _taken(tensors, f"{_PREFIX}{layer}{_A}", (config.r, columns), what, config)
            b = _taken(tensors, f"{_PREFIX}{layer}{_B}", (rows, config.r), what, config)
            layers[layer] = (a, b)
    require_targets(what, config.target_modules, [layer for layer, _ in known])
    if tensors:
        raise ModelError(f"{what} has {min(tensors)}, which belongs to none of its target_modules in this model")
    return layers


def require_targets(what: str, targets: Iterable[str], layers: Sequence[str]) -> None:
    """Raises ModelError for a target that is the end of no layer's name."""
    for end in targets:
        if not any(layer == end or layer.endswith(f".{end}") for layer in layers):
            ends = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers})) or "none"
            raise ModelError(f"{what} targets {end}, which is no linear layer here; these are {ends}")


def base_digest(tensors: NamedTensors) -> str:
    """A fingerprint of a whole model, in whatever order its tensors come. It is that of its values in bfloat16, so that
    an engine which holds the model in either precision finds the same one."""
    return hashlib.sha256("\n".join(sorted(_fingerprint(*each) for each in tensors)).encode()).hexdigest()[:32]


def _fingerprint(name: str, tensor: Tensor) -> str:
    rounded = tensor.detach().to(torch.bfloat16).to(CPU).contiguous()
    content = memoryview(rounded.view(torch.int16).numpy()).cast("B")
    return f"{name} {[*tensor.shape]} {hashlib.sha256(content).hexdigest()}"


def _taken(tensors: dict[str, Tensor], key: str, shape: tuple[int, int], what: str, config: AdapterConfig) -> Tensor:
    found = tensors.pop(key, None)
    if found is None or tuple(found.shape) != shape:
        got = "no such tensor" if found is None else f"the shape {[*found.shape]}"
        raise ModelError(
            f"{what} must have {key} with the shape {[*shape]}, got {got}; "
            f"it has r={config.r} and targets {', '.join(config.target_modules)}"
        )
    return found
