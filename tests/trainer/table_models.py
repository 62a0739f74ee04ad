"""Models that are tables, chosen from by the token before: small enough to work out every gradient by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.engine.training.packing import Span


@dataclass
class TablePass:
    order: Tensor
    spans: list[Span]

    @property
    def tokens(self) -> int:
        return sum(len(span.ids) for span in self.spans)


def passes_of(spans: Sequence[Span]) -> Iterator[TablePass]:
    """One for each sequence."""
    begin = 0
    for span in spans:
        yield TablePass(torch.arange(begin, begin + len(span.asked)), [span])
        begin += len(span.asked)
