"""The shape of a decoder, read from and written to a Hugging Face `config.json`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.errors import ModelError

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`model_type` of the families that this package's decoder computes, and Hugging Face's class for each."""


class UnknownArchitecture(ModelError):
    """A model that this package's decoder cannot compute; transformers may."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Architecture:
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    attention_bias: bool = False
    value_head: bool = False
    """A critic: one number after each token in place of logits."""
    eos_token_ids: tuple[int, ...] = ()
    """Not a shape: kept so that a saved model ends its answers as the loaded one did."""

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.family == "qwen2"

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.family != "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


def read_architecture(directory: Path) -> Architecture:
    """The architecture of a Hugging Face model directory. Raises UnknownArchitecture for one that cannot be run."""
    raw = read_config_json(directory)
    _check_supported(raw, directory)
    try:
        return _architecture(raw, directory)
    except KeyError as missing:
        raise ModelError(f"{directory / 'config.json'} lacks {missing}") from None


def read_config_json(directory: Path) -> dict[str, Any]:
    """A model's settings as they are in its file. Raises ModelError if there are none."""
    file = directory / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(
            f"no model at {str(directory)!r}: it has no config.json; "
            "set actor.path to a Hugging Face model directory or to builtin:tiny-math"
        ) from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _check_supported(raw: dict[str, Any], directory: Path) -> None:
    family = raw.get("model_type", "")
    if family not in FAMILIES:
        raise UnknownArchitecture(
            f"model type {family!r} in {str(directory)!r} cannot be run; the families are {', '.join(FAMILIES)}"
        )
    for key, usual in (("use_sliding_window", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if raw.get(key, usual) not in (usual, None):
            raise UnknownArchitecture(
                f"{key}={raw[key]!r} in {str(directory)!r} cannot be run; only {key}={usual!r} can"
            )


def _architecture(raw: dict[str, Any], directory: Path) -> Architecture:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    return Architecture(
        family=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate_size=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=_read_scaling(rope, directory),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _read_scaling(rope: dict[str, Any], directory: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnknownArchitecture(
            f"rotary scaling {kind!r} in {str(directory)!r} cannot be run; the kinds are default, llama3"
        )
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_positions=rope["original_max_position_embeddings"],
    )


def write_architecture(architecture: Architecture, directory: Path) -> None:
    """Write a `config.json` that Hugging Face's own classes load."""
    eos = architecture.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [_class_name(architecture)],
        "model_type": architecture.family,
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "intermediate_size": architecture.intermediate_size,
        "max_position_embeddings": architecture.max_positions,
        "rope_theta": architecture.rope_theta,
        "rms_norm_eps": architecture.norm_eps,
        "tie_word_embeddings": architecture.tied_embeddings,
        "attention_bias": architecture.attention_bias,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
    }
    scaling = architecture.rope_scaling
    if scaling is not None:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    if architecture.value_head:
        raw |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _class_name(architecture: Architecture) -> str:
    """A critic is what Hugging Face calls a sequence classifier with one label."""
    name = FAMILIES[architecture.family]
    return name.replace("ForCausalLM", "ForSequenceClassification") if architecture.value_head else name


def rotary_frequencies(architecture: Architecture) -> list[float]:
    """Radians per position of each rotary pair."""
    half = architecture.head_dim // 2
    plain = [architecture.rope_theta ** (-i / half) for i in range(half)]
    scaling = architecture.rope_scaling
    return plain if scaling is None else [_scaled(frequency, scaling) for frequency in plain]


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_positions * frequency / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = min(1.0, max(0.0, (turns - scaling.low_freq_factor) / span))
    return frequency * kept + frequency / scaling.factor * (1 - kept)
