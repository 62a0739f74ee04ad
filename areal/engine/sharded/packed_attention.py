"""The attention of packed sequences, as transformers' models call it.

A model that is told this implementation hands its queries, keys and values over, and what its caller passed as
`packed`: the `Pack` that says which token attends to which. So every architecture of transformers that lets its
attention be chosen computes shared prefixes once, as the package's own decoder does: with masks, or with torch's flash
attention for sequences of various lengths.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.api.errors import ModelError
from areal.engine.training.packing import Pack
from areal.engine.training.segments import VarlenKernel
from areal.engine.transformers.model import read_config

PACKED_ATTENTION = "areal_packed"
"""The name of the implementation."""
MAX_HEAD = 192
"""Values of a head. Flash attention has kernels for 256, but not for the backward pass on every GPU."""


def register_packed_attention() -> None:
    """Let models be opened with `attn_implementation=PACKED_ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: "WindowedPack",
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Tensors have the shape [1, heads, tokens, dimension], the result [1, tokens, heads, dimension]."""
    if s_aux is not None:
        raise ModelError(
            f"{type(module).__name__} has attention sinks, which packed sequences do not know; leave actor.backend "
            "unset for this model"
        )
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return packed.within(sliding_window).attend(module.layer_idx, q, k, v, scaling, softcap).unsqueeze(0), None


class WindowedPack:
    """A pack, and what is left of its masks in layers with a sliding window, made once for all of them."""

    def __init__(self, pack: Pack) -> None:
        self._windows: dict[int | None, Pack] = {None: pack}

    def within(self, window: int | None) -> Pack:
        if window not in self._windows:
            assert window is not None
            self._windows[window] = self._windows[None].within(window)
        return self._windows[window]


def find_kernel(attention: str, directory: Path, device: torch.device, dtype: str) -> VarlenKernel | None:
    """What computes attention without masks (`actor.attention`); None = masks do. Raises ModelError if it must not."""
    lacks = _unfit(read_config(directory).get_text_config(), device, dtype)
    if attention == "mask" or (attention == "auto" and lacks is not None):
        return None
    if lacks is not None:
        raise ModelError(
            "actor.attention varlen is for GPUs, bfloat16, scores without caps and heads of a multiple of 8 up to "
            f"{MAX_HEAD}, got {lacks}; use auto, which takes masks where they are needed"
        )
    from torch.nn.attention.varlen import varlen_attn

    kernel: VarlenKernel = varlen_attn
    return kernel


def _unfit(config: Any, device: torch.device, dtype: str) -> str | None:
    """What flash attention cannot compute."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"attn_logit_softcapping {config.attn_logit_softcapping} in the model's config"
    if head % 8 or head > MAX_HEAD:
        return f"heads of {head}"
    if dtype != "bfloat16":
        return f"actor.dtype {dtype}"
    return None if device.type == "cuda" else f"the device {device}"


def packed_inputs(pack: Pack) -> dict[str, Any]:
    """What a model's forward pass is given to compute a pack."""
    return {
        "input_ids": pack.ids[None],
        "position_ids": pack.positions[None],
        "use_cache": False,
        "packed": WindowedPack(pack),
    }
