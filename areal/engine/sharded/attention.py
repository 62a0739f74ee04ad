"""The attention of packed sequences, as transformers' models call it.

A model that is told this implementation hands its queries, keys and values over, and what its caller passed as
`packed`: the `Pack` that says which token attends to which. So every architecture of transformers that lets its
attention be chosen computes shared prefixes once, as the package's own decoder does.
"""

from typing import Any

from torch import Tensor

from areal.api.errors import ModelError
from areal.engine.training.packing import Pack

PACKED_ATTENTION = "areal_packed"
"""The name of the implementation."""


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


def packed_inputs(pack: Pack) -> dict[str, Any]:
    """What a model's forward pass is given to compute a pack."""
    return {
        "input_ids": pack.ids[None],
        "position_ids": pack.positions[None],
        "use_cache": False,
        "packed": WindowedPack(pack),
    }
