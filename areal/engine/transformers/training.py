"""Train a transformers model: padded batches of sequences of similar length, the head only at columns with a loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.api.messages import Array
from areal.engine.model.adapter import LowRank
from areal.engine.model.low_rank import Switch
from areal.engine.model.published import NamedTensors, WeightWriter
from areal.engine.training.head import Temperatures, token_logprobs
from areal.engine.training.packing import Span
from areal.engine.training.token_sets import DrawnFrom
from areal.engine.transformers.images import Images
from areal.engine.transformers.low_rank import adapt_module, head_layer
from areal.engine.transformers.model import TransformersModel


@dataclass
class PaddedPass:
    """Tensors on the model's device."""

    ids: Tensor
    images: list[Images]
    columns: Tensor
    """Positions whose next token is wanted in some sequence."""
    picks: tuple[Tensor, Tensor]
    """Sequence and column of each asked position."""
    targets: Tensor
    order: Tensor

    @property
    def tokens(self) -> int:
        return int(self.ids.numel())


@dataclass(frozen=True)
class _Item:
    span: Span
    ids: list[int]
    """As far as the asked positions depend on them."""
    offset: int
    """Of its first asked position among those of all spans."""
    shape: tuple[Any, ...]


class TransformersTraining:
    """Implements `TrainableModel`, and `Adaptable`."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.flat, self.flat_grad, self.matrices = model.flat, model.flat_grad, model.matrices

    def passes(self, spans: Sequence[Span], max_tokens: int) -> Iterator[PaddedPass]:
        part: list[_Item] = []
        for item in self._items(spans):
            if part and not self._fits(part, item, max_tokens):
                yield self._pass(part)
                part = []
            part.append(item)
        if part:
            yield self._pass(part)

    def scores(
        self,
        part: PaddedPass,
        temperatures: Temperatures,
        drawn: DrawnFrom | None = None,
        entropies: Tensor | None = None,
    ) -> Tensor:
        if self.model.value_head:
            return self.model.values(part.ids)[part.picks[0], part.columns[part.picks[1]]]
        logits = self.model.logits(part.ids, part.images, part.columns)
        return token_logprobs(logits[part.picks], part.targets, temperatures, drawn, entropies)

    @property
    def head_layer(self) -> str:
        return head_layer(self.model.module)

    def adapt(self, layers: Mapping[str, LowRank], scale: float) -> Switch:
        return adapt_module(self.model.module, layers, scale)

    def linear_weights(self) -> NamedTensors:
        return self.model.linear_weights()

    def named_weights(self) -> NamedTensors:
        return self.model.named_weights()

    def named_views(self, flat: Tensor) -> NamedTensors:
        return self.model.named_views(flat)

    def writer(self, directory: Path, dtype: torch.dtype) -> WeightWriter:
        return WeightWriter(directory, self.named_weights(), dtype=dtype)

    def load(self, directory: Path) -> None:
        self.model.load(directory)

    def save(self, directory: Path) -> None:
        self.model.save(directory)

    def _items(self, spans: Sequence[Span]) -> list[_Item]:
        """Spans with asked positions, in an order in which neighbours are best computed together."""
        offsets = np.cumsum([0, *(len(span.asked) for span in spans)])
        pairs = zip(spans, offsets[:-1].tolist(), strict=True)
        items = [self._item(span, offset) for span, offset in pairs if len(span.asked)]
        return sorted(items, key=lambda item: (str(item.shape), len(item.ids)))

    def _item(self, span: Span, offset: int) -> _Item:
        self.model.check(span.ids, span.images)
        length = max(int(span.asked[-1]), self.model.length_with_images(span.ids))
        return _Item(span, span.ids[:length].tolist(), offset, self.model.shape(span.images))

    def _fits(self, part: list[_Item], item: _Item, max_tokens: int) -> bool:
        columns = len(_columns([*part, item]))
        fits = self.model.fits(len(part) + 1, len(item.ids), columns, max_tokens)  # its ids are the longest yet
        return fits and item.shape == part[0].shape

    def _pass(self, part: list[_Item]) -> PaddedPass:
        columns = _columns(part)
        sources = [item.span.asked - 1 for item in part]
        rows = np.repeat(np.arange(len(part)), [len(each) for each in sources])
        places = np.concatenate([np.arange(item.offset, item.offset + len(item.span.asked)) for item in part])
        targets = np.concatenate([item.span.ids[item.span.asked] for item in part])
        picked = np.searchsorted(columns, np.concatenate(sources))
        return PaddedPass(
            ids=self.model.sent(self.model.padded([item.ids for item in part])),
            images=[item.span.images for item in part],
            columns=self._sent(columns),
            picks=(self._sent(rows), self._sent(picked)),
            targets=self._sent(targets.astype(np.int64)),
            order=self._sent(places),
        )

    def _sent(self, array: Array) -> Tensor:
        return self.model.sent(torch.from_numpy(array))


def _columns(part: Sequence[_Item]) -> Any:
    return np.unique(np.concatenate([item.span.asked - 1 for item in part]))
