"""What a training run asks of whatever holds the weights that it trains: one process (engine.py), or several ranks.

A `Learner` is the policy, a `Critic` the value model beside it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from areal.api.engine_api import WeightUpdate
from areal.engine.training.engine import Loss, TokenBatch
from areal.engine.training.figures import Figures


class LogProbs(Protocol):
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probability of every trained token [N] under the present weights, on the host."""
        ...


class Trained(Protocol):
    def train_batch(
        self,
        batch: TokenBatch,
        loss: Loss,
        place: int | None = None,
        *,
        scores: Tensor | None = None,
        entropies: Tensor | None = None,
    ) -> Figures:
        """One optimizer step, or none for an empty batch; returns the loss's figures and the step's own.

        `place` is the step's place in the learning-rate schedule, from 0; None = the one after the last. `scores` [N],
        on the host, takes those of the forward passes, which are of the weights before the step, and `entropies` [N]
        those of what a policy drew its tokens from. Raises NonFiniteUpdate, with weights, optimizer and these as they
        were, if loss or gradient are not finite.
        """
        ...

    def begin_checkpoint(self, directory: Path) -> Callable[[], None] | None:
        """Write the model and the optimizer into a directory. None = all of it is there.

        Otherwise copies have been taken and the weights may change; what is returned waits until they are written.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What else a checkpoint must keep, for `load_checkpoint`."""
        ...

    def load_checkpoint(self, directory: Path, state: dict[str, Any]) -> None: ...


class Critic(Trained, Protocol):
    def values(self, batch: TokenBatch) -> Tensor:
        """What is expected before every trained token [N], under the present weights, on the host."""
        ...


class Learner(LogProbs, Critic, Protocol):
    """The policy, which gives log-probs; a reward model, which is trained in its place, gives values."""

    version: int

    def publish(self, dtype: str = "float32") -> WeightUpdate:
        """The weights as the present version, for engines that compute in `dtype`; the previous one stays readable."""
        ...

    def close(self) -> None: ...
