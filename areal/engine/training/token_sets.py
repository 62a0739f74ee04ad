"""The tokens that trained ones were drawn from, as tensors: what a log-prob is taken over.

Sets are ragged: each different one is kept once, as the tokens in it or, where these are fewer, as those that are not.
A mask over the vocabulary exists for a piece of the logits at a time.

Shapes: N tokens, S sets, R rows of logits, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.engine.model.device import to_device

FIELD = "sets"
"""Of a batch: which set each of its tokens was drawn from [N]."""


@dataclass(frozen=True)
class TokenSets:
    """Sets of tokens, the first of which is the whole vocabulary."""

    ids: Tensor
    """int64: those of all sets, one after the other."""
    starts: Tensor
    """[S]: where each begins."""
    sizes: Tensor
    """[S]"""
    inverted: Tensor
    """[S]: the ids are those that are not in the set."""

    def on(self, device: torch.device) -> "TokenSets":
        return TokenSets(*(to_device(each, device) for each in (self.ids, self.starts, self.sizes, self.inverted)))

    @property
    def single(self) -> Tensor:
        """[S]: there is no choice."""
        return (self.sizes == 1) & ~self.inverted


@dataclass(frozen=True)
class DrawnFrom:
    """The set that each of some tokens was drawn from: `numbers` [N] among `sets`."""

    sets: TokenSets
    numbers: Tensor

    def __getitem__(self, tokens: slice | Tensor) -> "DrawnFrom":
        return replace(self, numbers=self.numbers[tokens])

    def limit(self, logits: Tensor) -> None:
        """In place: minus infinity outside the set of each row [R,V]."""
        sets, numbers = self.sets, self.numbers
        starts, sizes = sets.starts[numbers], sets.sizes[numbers]
        rows = torch.repeat_interleave(sizes)
        within = torch.ones_like(rows).cumsum(0) - 1 - (sizes.cumsum(0) - sizes)[rows]
        listed = torch.zeros_like(logits, dtype=torch.bool)
        listed.index_put_((rows, sets.ids[starts[rows] + within]), torch.ones_like(rows, dtype=torch.bool))
        logits.masked_fill_(listed == sets.inverted[numbers][:, None], -torch.inf)
