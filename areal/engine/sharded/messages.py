"""What the driver sends to the ranks."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from areal.api.messages import Array
from areal.config.algorithm import Algorithm
from areal.config.parallel import Ranks
from areal.config.training import ActorConfig
from areal.engine.training.engine import Loss, TokenBatch
from areal.engine.training.objective import PolicyObjective, ValueObjective
from areal.engine.training.packing import Span
from areal.engine.training.pairs import WeightedScores
from areal.engine.training.supervised import MeanNll
from areal.engine.training.token_sets import TokenSets
from areal.utils.wire import Wire

FrozenRole = Literal["reference", "teacher"]
"""Of a model that the ranks hold and do not train."""
TrainedRole = Literal["actor", "critic"]
Role = TrainedRole | FrozenRole
"""Of a model that the ranks hold. A reward model is a critic without an actor."""


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
    seed: int = 1
    """Of a new adapter."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a batch."""

    spans: list[Span]
    temperatures: Array
    fields: dict[str, Array]
    loss: Loss | None = None
    place: int = 0
    """In the learning-rate schedule."""
    sets: list[Array] | None = None
    """The tensors of `TokenSets`."""

    @classmethod
    def of(cls, batch: TokenBatch, loss: Any = None, place: int = 0) -> "Share":
        fields = {name: values.numpy() for name, values in batch.fields.items()}
        sets = None if batch.sets is None else [each.numpy() for each in vars(batch.sets).values()]
        return cls(list(batch.spans), batch.temperatures.numpy(), fields, loss, place, sets)

    def batch(self) -> TokenBatch:
        fields = {name: torch.from_numpy(values) for name, values in self.fields.items()}
        sets = None if self.sets is None else TokenSets(*map(torch.from_numpy, self.sets))
        return TokenBatch(self.spans, torch.from_numpy(self.temperatures), fields, sets=sets)


def rank_wire() -> Wire:
    return Wire((Share, Span, Algorithm, PolicyObjective, ValueObjective, MeanNll, WeightedScores))
