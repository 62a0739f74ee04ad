"""Layers that compute with W + scale · B A, without W changing: the decoder's, whose matrices are several layers' each.

The product with A and B is computed beside that with W, so that its gradient needs no matrix of W's size. Shapes: T
tokens, r rank; A is [r, in], B is [out, r].
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.model.adapter import LowRank
from areal.engine.model.decoder import Decoder
from areal.engine.model.weights import fused_layers


class Switch:
    """Whether an adapter is computed."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """For the model as it was before. What is computed again for a gradient must not be computed in here."""
        self.on = False
        try:
            yield
        finally:
            self.on = True


def low_rank_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x[...,in] · (B A)ᵀ, in the dtype of `x`, or under autocast in its own."""
    return F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))


class DecoderAdapter:
    """What the package's decoder multiplies by."""

    def __init__(self, decoder: Decoder, layers: Mapping[str, LowRank], scale: float) -> None:
        """`layers`: by their Hugging Face names."""
        self.switch = Switch()
        self._scale = scale
        self._head = decoder.head
        self._parts: dict[int, list[tuple[int, LowRank | None]]] = {}
        """By the identity of the decoder's matrix: the rows of each layer in it, and its matrices."""
        self._matrices = []
        for matrix, parts in fused_layers(decoder):
            if any(layer in layers for layer, _ in parts):
                self._parts[id(matrix)] = [(rows, layers.get(layer)) for layer, rows in parts]
                self._matrices.append(matrix)  # so that its identity stays its own

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A `Linear` of the decoder."""
        whole = F.linear(x, weight, bias)
        parts = self._parts.get(id(weight)) if self.switch.on else None
        if parts is None:
            return whole
        pieces = whole.split([rows for rows, _ in parts], dim=-1)
        added = [
            piece if matrices is None else torch.add(piece, low_rank_product(x, *matrices), alpha=self._scale)
            for piece, (_, matrices) in zip(pieces, parts, strict=True)
        ]
        return added[0] if len(added) == 1 else torch.cat(added, dim=-1)

    def head(self) -> Tensor:
        """The head's matrix, with what the adapter adds to it."""
        parts = self._parts.get(id(self._head)) if self.switch.on else None
        if parts is None:
            return self._head
        ((_, matrices),) = parts
        assert matrices is not None, "a head is a layer of its own"
        a, b = matrices
        return torch.addmm(self._head, b, a, alpha=self._scale)
