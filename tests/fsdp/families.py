"""Small random models of every family that ranks train: each has an option that could be sharded wrongly."""

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 271,  # odd: on two ranks, one has less of the embedding than the other
    "hidden_size": 32,
    "intermediate_size": 63,  # so is this
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOW = {"sliding_window": 12}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", UNTIED),
    "Llama-biased": ("Llama", TIED | {"attention_bias": True, "mlp_bias": True}),
    "Qwen2": ("Qwen2", UNTIED),
    "Qwen3": ("Qwen3", UNTIED),
    "Qwen3-tied": ("Qwen3", TIED),
    "Mistral": ("Mistral", UNTIED | WINDOW),
    "Gemma": ("Gemma", TIED),
    "Gemma2": ("Gemma2", TIED | WINDOW | CAPS),
    "Gemma3": ("Gemma3", TIED | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "Qwen3Moe": ("Qwen3Moe", UNTIED | EXPERTS),
}


def write_family(name: str, directory: Path, **changes: Any) -> Path:
    """No parameter is 0 or 1: one that is never read, or never stepped, would not be missed otherwise."""
    import transformers

    base, options = FAMILIES[name]
    suffix = "TextConfig" if base == "Gemma3" else "Config"
    config = getattr(transformers, base + suffix)(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, base + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory
