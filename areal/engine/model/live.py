"""The weights that an engine computes with, and how a published version takes their place.

A version is staged while the engine computes (`stage`: read, checked, adapters added to the model), and swapped between
two steps (`swap`: copied). An adapter is always added to the whole model that the engine had last, never to what an
adapter before it left, so nothing accumulates however many follow each other. For that, what the whole model has in
the layers that an adapter changed is kept; an engine that is given whole models only keeps nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.api.errors import WeightMismatch
from areal.engine.model.adapter import base_digest, read_adapter
from areal.engine.model.published import NamedTensors, WeightReader


class HoldsWeights(Protocol):
    def named_weights(self) -> NamedTensors:
        """Every parameter once, by its Hugging Face name; new weights are copied into these tensors."""
        ...

    def linear_weights(self) -> NamedTensors:
        """Those of them that are the matrix [out, in] of a linear layer, which an adapter can change."""
        ...


@dataclass(frozen=True)
class StagedWeights:
    """A version that was checked and waits for the swap."""

    update: WeightUpdate
    pairs: list[tuple[Tensor, Tensor]]
    """Each tensor that changes, and its new values."""
    originals: Mapping[str, Tensor] = field(default_factory=dict)
    """What the whole model has in the layers that this version changes, if it is an adapter."""
    after: int | None = None
    """How many swaps came before it was made from the weights as they were; None = it does not depend on them."""


class LiveWeights:
    """Only `stage` may run in another thread."""

    def __init__(self, model: HoldsWeights) -> None:
        self._model = model
        self._reader = WeightReader()
        self._originals: Mapping[str, Tensor] = {}
        self._swaps = 0
        self._base: tuple[int, str] | None = None
        """The digest of the whole model, and the number of the swap that brought it."""
        self._base_swap = 0
        self.size_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in model.named_weights())

    def stage(self, update: WeightUpdate) -> StagedWeights:
        """Raises WeightMismatch, with everything as it was."""
        if update.layout == "model":
            return StagedWeights(update, self._reader.read(update, self._model.named_weights()))
        swaps, before = self._swaps, self._originals
        weights = {name: tensor.detach() for name, tensor in self._model.linear_weights()}
        adapter = read_adapter(self._reader, update, weights.items())
        self._check_base(update, adapter.base_digest)
        with torch.no_grad():
            originals = {name: before[name] if name in before else weights[name].clone() for name in adapter.layers}
            pairs = [(weights[name], adapter.merged(name, original)) for name, original in originals.items()]
        pairs += [(weights[name], original) for name, original in before.items() if name not in originals]
        return StagedWeights(update, pairs, originals, swaps)

    def is_ready(self, staged: StagedWeights | None, update: WeightUpdate) -> bool:
        """Whether this can be swapped in for the update: an adapter was added to weights that may be others now."""
        return staged is not None and staged.update == update and staged.after in (None, self._swaps)

    def swap(self, staged: StagedWeights) -> None:
        for tensor, new in staged.pairs:
            tensor.copy_(new)
        self._swaps += 1
        self._originals = staged.originals
        if staged.update.layout == "model":
            self._base_swap = self._swaps

    def _check_base(self, update: WeightUpdate, wanted: str) -> None:
        number = self._base_swap
        if self._base is None or self._base[0] != number:
            whole = dict(self._model.named_weights()) | dict(self._originals)
            self._base = (number, base_digest(whole.items()))
        if self._base[1] != wanted:
            raise WeightMismatch(
                f"the adapter of version {update.version} belongs to a model with the digest {wanted}, this engine's "
                f"has {self._base[1]}; start the engine with the trainer's model, or publish that whole first"
            )
