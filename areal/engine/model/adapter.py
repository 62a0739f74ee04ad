"""LoRA adapters: how they are published, and how they are added to the weights of a model.

An adapter changes linear layers. Each of them then computes with W + lora_alpha/r · B A, where A has the shape [r, in]
and B the shape [out, r]. The published file has PEFT's names, with the fields of PEFT's adapter_config.json in its
metadata, and that file is beside it: a version's directory is one that PEFT and vLLM load. The metadata also has a
digest of the model that the adapter belongs to, since on any other it would give wrong tokens without an error.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ModelError, WeightMismatch
from areal.engine.model.published import NamedTensors, WeightReader, WeightWriter
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

    def to_json(self) -> str:
        fields = {"r": self.r, "lora_alpha": self.lora_alpha, "target_modules": [*self.target_modules]}
        return json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **fields})

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
    directory: Path, config: AdapterConfig, layers: Mapping[str, LowRank], base: NamedTensors
) -> WeightWriter:
    """Writes versions of an adapter: `layers` by their name, e.g. model.layers.0.self_attn.q_proj, to the model `base`.

    Each `write` reads what the matrices hold then. Raises ArealError if there is no room.
    """
    named = []
    for layer, (a, b) in layers.items():
        named += [(f"{_PREFIX}{layer}{_A}", a), (f"{_PREFIX}{layer}{_B}", b)]
    text = config.to_json()
    metadata = {_CONFIG: text, _BASE: base_digest(base)}
    return WeightWriter(directory, named, layout="adapter", metadata=metadata, texts={CONFIG_NAME: text})


@dataclass(frozen=True)
class Adapter:
    """One that was read and fits the model."""

    scale: float
    layers: dict[str, LowRank]
    """By the name of the layer's weight."""
    base_digest: str

    def merged(self, name: str, original: Tensor) -> Tensor:
        """The weight of a layer with what the adapter adds to it, computed in float32."""
        a, b = (each.to(original.device, torch.float32) for each in self.layers[name])
        return torch.addmm(original.float(), b, a, alpha=self.scale).to(original.dtype)


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
    layers = {}
    known = [(name.removesuffix(".weight"), name, weight) for name, weight in linear]
    for layer, name, weight in known:
        if config.targets(layer):
            rows, columns = weight.shape
            a = _taken(tensors, f"{_PREFIX}{layer}{_A}", (config.r, columns), what, config)
            b = _taken(tensors, f"{_PREFIX}{layer}{_B}", (rows, config.r), what, config)
            layers[name] = (a, b)
    for end in config.target_modules:
        if not any(layer == end or layer.endswith(f".{end}") for layer, _, _ in known):
            ends = sorted({layer.rpartition(".")[2] for layer, _, _ in known})
            raise WeightMismatch(f"{what} targets {end}, which is no linear layer here; these are {', '.join(ends)}")
    if tensors:
        raise WeightMismatch(f"{what} has {min(tensors)}, which belongs to none of its target_modules in this model")
    return Adapter(config.scale, layers, metadata[_BASE])


def base_digest(tensors: NamedTensors) -> str:
    """A fingerprint of a whole model. It is that of its values in bfloat16, so that an engine which holds the model in
    either precision finds the same one."""
    state = hashlib.sha256()
    for name, tensor in _by_name(tensors):
        state.update(f"{name} {[*tensor.shape]}\n".encode())
        rounded = tensor.detach().to(torch.bfloat16).to("cpu").contiguous()
        state.update(memoryview(rounded.view(torch.int16).numpy()).cast("B"))
    return state.hexdigest()[:32]


def _by_name(tensors: NamedTensors) -> Iterable[tuple[str, Tensor]]:
    return sorted(tensors, key=lambda pair: pair[0])


def _taken(tensors: dict[str, Tensor], key: str, shape: tuple[int, int], what: str, config: AdapterConfig) -> Tensor:
    found = tensors.pop(key, None)
    if found is None or tuple(found.shape) != shape:
        got = "no such tensor" if found is None else f"the shape {[*found.shape]}"
        raise WeightMismatch(
            f"{what} must have {key} with the shape {[*shape]}, got {got}; "
            f"it has r={config.r} and targets {', '.join(config.target_modules)}"
        )
    return found
