"""How large a model is, of any architecture, from its `config.json` and the headers of its weights.

This is for those who plan (engine/memory.py), so it loads no torch and no weights: a `config.json` alone will do.
`architecture.py` is what this package's decoder computes; here a shape need only be right about sizes.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.api.errors import ModelError
from areal.engine.model.architecture import read_config_json

_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_MAX_HEADER_BYTES = 100 << 20
_HEAD_NORM_FAMILIES = ("qwen3", "gemma3", "olmo2")
"""Names of families that norm queries and keys begin so."""


@dataclass(frozen=True)
class ModelShape:
    """Of a decoder; of a model that sees images, its language part."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """What a token passes through in a layer: of a mixture, the experts that it is sent to, together."""
    max_positions: int
    tied_embeddings: bool
    head_norms: bool
    """Queries and keys are normed."""
    experts_per_token: int
    """0 = not a mixture of experts."""
    layer_parameters: int
    """Of one layer, all experts counted; where layers differ, the mean."""
    other_parameters: int
    """Outside the layers, the embedding and the head: norms, and the part that sees images."""

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """0 = the head is the embedding."""
        return 0 if self.tied_embeddings else self.embedding_parameters

    @property
    def parameters(self) -> int:
        layers = self.num_layers * self.layer_parameters
        return layers + self.embedding_parameters + self.head_parameters + self.other_parameters

    @property
    def attention_width(self) -> int:
        """Of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of all keys of a token, and of all values."""
        return self.num_kv_heads * self.head_dim


def read_shape(directory: Path) -> ModelShape:
    """Of a Hugging Face directory. Raises ModelError if its config.json lacks what is needed."""
    raw = read_config_json(directory)
    try:
        shape = _shape(raw.get("text_config") or raw)
    except KeyError as missing:
        raise ModelError(f"{directory / 'config.json'} lacks {missing}, so the model's size is not known") from None
    total = stored_parameters(directory)
    if total is None:
        return shape
    # What the formula misses is spread over the layers: it is where architectures differ.
    layers = total - shape.embedding_parameters - shape.head_parameters - shape.other_parameters
    return shape if layers <= 0 else _with_layers(shape, layers)


def stored_parameters(directory: Path) -> int | None:
    """How many there are in a directory's safetensors files, by their headers; None = there are no such files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    counts: dict[str, int] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                counts[name] = math.prod(entry["shape"])
    return sum(counts.values())


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError("its header is damaged")
            header: dict[str, Any] = json.loads(opened.read(length))
            return header
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the weights in {str(file)!r}: {error}") from None


def _shape(raw: dict[str, Any]) -> ModelShape:
    family, hidden, heads = raw.get("model_type", ""), raw["hidden_size"], raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or hidden // heads
    head_norms = family.startswith(_HEAD_NORM_FAMILIES)
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 0
    chosen = raw.get("num_experts_per_tok") or 1
    width = (raw.get("moe_intermediate_size") if experts else None) or raw["intermediate_size"]
    qkv_rows = (heads + 2 * kv_heads) * head_dim
    attention = qkv_rows * hidden + heads * head_dim * hidden
    if family == "qwen2" or raw.get("attention_bias"):
        attention += qkv_rows + (hidden if family != "qwen2" else 0)
    mlp = 3 * hidden * width * max(1, experts) + experts * hidden
    norms = 2 * hidden + (2 * head_dim if head_norms else 0)
    return ModelShape(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width * chosen if experts else width,
        max_positions=raw.get("max_position_embeddings") or 0,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        head_norms=head_norms,
        experts_per_token=chosen if experts else 0,
        layer_parameters=attention + mlp + norms,
        other_parameters=hidden,
    )


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    each, rest = divmod(layers, shape.num_layers)
    return replace(shape, layer_parameters=each, other_parameters=shape.other_parameters + rest)
