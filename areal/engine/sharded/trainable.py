"""Which models ranks can train, by their config alone: known before a process starts or a weight is read."""

from pathlib import Path
from typing import Any

from areal.api.errors import ModelError
from areal.config.parallel import Ranks
from areal.engine.transformers.model import read_config

TENSOR_PARALLEL = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "qwen3_moe")
"""Families whose every gradient was compared with that of one process. transformers has plans for more, and a wrong
one raises no error: it trains something else."""


def require_trainable(directory: Path, ranks: Ranks) -> None:
    """Raises ModelError, with the remedy, for a model that these ranks cannot train."""
    language_model_class(directory)
    config = read_config(directory)
    if ranks.tensor == 1:
        return
    if config.model_type not in TENSOR_PARALLEL:
        raise ModelError(
            f"tensor parallelism is for models of the types {', '.join(TENSOR_PARALLEL)}, {str(directory)!r} holds a "
            f"{config.model_type}; set actor.backend to fsdp:d{ranks.count}"
        )
    if has_experts(directory) and config.tie_word_embeddings:
        raise ModelError(
            f"tensor parallelism of experts is for models whose head is not the embedding, {str(directory)!r} has "
            f"tie_word_embeddings; set actor.backend to fsdp:d{ranks.count}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "num_experts"):
        size = getattr(config, name, None) or ranks.tensor
        if size % ranks.tensor:
            fitting = max(each for each in range(1, ranks.tensor) if size % each == 0)
            raise ModelError(
                f"the t of actor.backend must divide a model's {name}, which is {size} in {str(directory)!r}, got "
                f"t{ranks.tensor}; set it to fsdp:d{ranks.count // fitting}" + (f"t{fitting}" if fitting > 1 else "")
            )


def has_experts(directory: Path) -> bool:
    return bool(getattr(read_config(directory), "num_experts", None))


def language_model_class(directory: Path) -> Any:
    """transformers' class for it. Raises ModelError if it is no language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = read_config(directory)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"ranks train language models, got a {config.model_type}; leave actor.backend unset for it")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
