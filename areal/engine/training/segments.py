"""Packed sequences for a kernel that takes sequences of various lengths, as flash attention does, in place of masks.

A segment is the run of a sequence's tokens that no sequence before it shares. Its queries attend to the keys of the
whole sequence up to them: those of earlier segments are gathered, not computed again. So a shared prefix is computed
once here too, and no mask is made.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.model.device import to_device


class VarlenKernel(Protocol):
    """What `torch.nn.attention.varlen.varlen_attn` does, and how it is called.

    Where a sequence has fewer queries than keys, they are its last ones. `window_size` is how many keys to the left and
    to the right of its own a query sees; (-1, 0) = all to the left.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor: ...


@dataclass(frozen=True)
class SegmentRow:
    """All tokens of a pass, segment by segment; one call computes them."""

    kernel: VarlenKernel
    query_ends: Tensor
    """int32, after a 0."""
    key_ends: Tensor
    keys: Tensor
    """The token of each key."""
    tokens: int
    longest_query: int
    longest_key: int
    window: int | None = None

    @classmethod
    def of(cls, kernel: VarlenKernel, lengths: list[int], keys: list[Array]) -> "SegmentRow":
        """`lengths`: new tokens of each segment; `keys`: all tokens of its sequence up to its end."""
        key_lengths = [len(each) for each in keys]
        joined = torch.from_numpy(np.concatenate(keys).astype(np.int64))
        return cls(kernel, _ends(lengths), _ends(key_lengths), joined, sum(lengths), max(lengths), max(key_lengths))

    def on(self, device: torch.device) -> "SegmentRow":
        return replace(
            self,
            query_ends=to_device(self.query_ends, device),
            key_ends=to_device(self.key_ends, device),
            keys=to_device(self.keys, device),
        )

    def within(self, window: int, positions: Tensor) -> "SegmentRow":
        return replace(self, window=window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, cap: float | None) -> Tensor:
        assert cap is None, "models with capped scores are computed with masks"
        return self.kernel(
            q.to(v.dtype),  # norms leave queries and keys in float32 where only matrix products are in half precision
            k.to(v.dtype)[self.keys],
            v[self.keys],
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            scale=scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=True,
        )


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
