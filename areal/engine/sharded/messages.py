"""What the driver sends to the ranks."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from areal.api.messages import Array
from areal.config.parallel import Ranks
from areal.config.training import ActorConfig
from areal.engine.training.engine import Loss, TokenBatch
from areal.engine.training.objective import PolicyObjective, ValueObjective
from areal.engine.training.packing import Span
from areal.engine.training.supervised import MeanNll
from areal.utils.wire import Wire

Role = Literal["actor", "critic", "reference"]
"""Of a model that the ranks hold. The reference is not trained."""


@dataclass(frozen=True)
class RankSetup:
    """Pickled once by the driver, over the authenticated channel."""

    rank: int
    ranks: Ranks
    actor: ActorConfig
    total_steps: int
    """Optimizer steps of the whole run."""
    threads: int
    store: tuple[str, int]
    """Where rank 0 listens."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a batch."""

    spans: list[Span]
    temperatures: Array
    fields: dict[str, Array]
    loss: Loss | None = None
    place: int = 0
    """In the learning-rate schedule."""

    @classmethod
    def of(cls, batch: TokenBatch, loss: Any = None, place: int = 0) -> "Share":
        fields = {name: values.numpy() for name, values in batch.fields.items()}
        return cls(list(batch.spans), batch.temperatures.numpy(), fields, loss, place)

    def batch(self) -> TokenBatch:
        fields = {name: torch.from_numpy(values) for name, values in self.fields.items()}
        return TokenBatch(self.spans, torch.from_numpy(self.temperatures), fields)


def rank_wire() -> Wire:
    return Wire((Share, Span, PolicyObjective, ValueObjective, MeanNll))
