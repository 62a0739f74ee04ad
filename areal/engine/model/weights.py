"""The decoder's weights on disk, in Hugging Face's safetensors and names."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal.api.errors import ModelError
from areal.engine.model.architecture import Architecture
from areal.engine.model.decoder import Decoder, parameter_views
from areal.engine.model.device import CPU

VALUE_HEAD = "score.weight"
"""A critic's head, as sequence classifiers name it."""
_WHOLE = {
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "value_head": VALUE_HEAD,
    "final_norm": "model.norm.weight",
}
_IN_LAYER = {
    "attention_norm": ("input_layernorm.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


def load_weights(decoder: Decoder, directory: Path) -> None:
    """Fill the decoder from every safetensors file of a Hugging Face directory.

    A critic that starts from a language model values everything at 0 before it learns.
    """
    files = _tensor_files(directory)
    with torch.no_grad():
        for name, part in named_weights(decoder):
            if name == VALUE_HEAD and name not in files:
                part.zero_()
                continue
            if name not in files:
                raise ModelError(f"the weights in {str(directory)!r} lack {name}")
            with _opened(files[name]) as file:
                tensor = file.get_tensor(name)
            if tensor.shape != part.shape:
                raise ModelError(
                    f"{name} in {str(directory)!r} must have the shape {[*part.shape]} that config.json gives it, "
                    f"got {[*tensor.shape]}; take both files from one model"
                )
            part.copy_(tensor)


def has_value_head(directory: Path) -> bool:
    """Whether the weights of a directory are those of a critic or a reward model."""
    return VALUE_HEAD in _tensor_files(directory)


def save_weights(decoder: Decoder, directory: Path) -> None:
    """Write `model.safetensors` in Hugging Face's names."""
    tensors = {name: part.detach().to(CPU, copy=True).contiguous() for name, part in named_weights(decoder)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Each Hugging Face name, and the view of the fused parameter that holds it."""
    return _named_parts(decoder.architecture, decoder.parameters)


def named_views(architecture: Architecture, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same of any buffer that is laid out as the parameters are."""
    return _named_parts(architecture, parameter_views(architecture, flat))


def _named_parts(architecture: Architecture, parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters.items():
        if name in _WHOLE:
            yield _WHOLE[name], parameter
            continue
        _, index, kind = name.split(".")
        names = _IN_LAYER[kind]
        rows = _rows(kind, architecture, parameter.shape[0])
        for part, piece in zip(names, parameter.split(rows), strict=True):
            yield f"model.layers.{index}.{part}", piece


def linear_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The matrices of linear layers among them: all but the embedding, which a tied head shares."""
    return (pair for pair in named_weights(decoder) if pair[1].dim() > 1 and pair[0] != _WHOLE["embedding"])


def fused_layers(decoder: Decoder) -> Iterator[tuple[Tensor, list[tuple[str, int]]]]:
    """Each matrix of the decoder that linear layers share, with the layers' names and how many rows each has."""
    for name, parameter in decoder.parameters.items():
        if parameter.dim() > 1 and name not in ("embedding", "value_head"):
            parts = _named_parts(decoder.architecture, {name: parameter})
            yield parameter, [(part.removesuffix(".weight"), len(piece)) for part, piece in parts]


def _rows(kind: str, a: Architecture, total: int) -> list[int]:
    if kind in ("qkv", "qkv_bias"):
        return [a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim]
    return [total // 2, total // 2] if kind == "gate_up" else [total]


def _tensor_files(directory: Path) -> dict[str, Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{index} must hold a weight_map of tensors to files: {error!r}") from None
        return {name: directory / file for name, file in table.items()}
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with _opened(path) as file:
            files |= dict.fromkeys(file.keys(), path)
    if not files:
        raise ModelError(f"no *.safetensors weights in {str(directory)!r}")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {str(path)!r}: {error}") from None
