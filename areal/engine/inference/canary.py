"""Whether an engine of others computes with the weights that it was given.

vLLM and SGLang call their weights what they are told to, so the name proves nothing: the load may have done nothing, or
a part. What they compute proves it, within arithmetic. After each change of weights they are asked how likely the
tokens of a short text are, and the trainer has computed the same under the weights that it published (`Canary`).

The median token's difference counts: one expert chosen otherwise, or one token in a tail, moves a few tokens far. What
an engine's arithmetic explains is seen when it is asked first. Later answers may be `MARGIN` times further off.
"""

import math
from collections.abc import Sequence
from statistics import median

from areal.api.engine_api import Canary, WeightUpdate
from areal.api.errors import WrongWeights

MARGIN = 8.0
"""Arithmetic moves by a small factor while a model is trained; other weights are off by much more."""
LEAST_LIMIT = 1e-4
"""In nats. Two ways to compute in float32 differ by less, one training step at a learning rate of 1e-6 by more."""
SHOWN = 4
"""Log-probs in an error message."""


class CanaryCheck:
    """Of one engine, from its start to its end."""

    def __init__(self) -> None:
        self.noise: float | None = None
        """How far its first answer was off; None = it has given none."""

    def check(self, engine: str, update: WeightUpdate, found: Sequence[float]) -> None:
        """`found`: the engine's log-probs of the canary under these weights. Raises WrongWeights."""
        canary = update.canary
        assert canary is not None, "it is asked only where there is one"
        limit = canary.tolerance
        if self.noise is not None:
            limit = min(limit, max(LEAST_LIMIT, MARGIN * self.noise))
        off = _off(found, canary.logprobs)
        if not off <= limit:  # so that it holds for NaN too
            raise WrongWeights(
                f"{engine} must compute with the weights of version {update.version}, which it was given, but the "
                f"log-probs of {len(canary.logprobs)} canary tokens are off by {off:.2g}, where arithmetic explains "
                f"{limit:.2g}: expected {_shown(canary.logprobs)}, got {_shown(found)}; "
                f"{_diagnosis(canary, off, found)}"
            )
        if self.noise is None:
            self.noise = off


def _off(found: Sequence[float], expected: Sequence[float]) -> float:
    """The median token's; infinite unless there is a number for every token."""
    if len(found) != len(expected) or not all(map(math.isfinite, found)):
        return math.inf
    return median(abs(each - other) for each, other in zip(found, expected, strict=True))


def _diagnosis(canary: Canary, off: float, found: Sequence[float]) -> str:
    distances = {version: _off(found, logprobs) for version, logprobs in canary.earlier.items()}
    nearest = min(distances, key=lambda version: distances[version], default=None)
    if nearest is not None and distances[nearest] < off / 2:
        return f"it is stale: the log-probs of version {nearest} are {distances[nearest]:.2g} away; start it anew"
    return (
        "it lost a part of them, or computes in less precision than rollout.dtype says; start it anew, or set that to "
        "what it computes in"
    )


def _shown(logprobs: Sequence[float]) -> str:
    return " ".join(f"{each:.4f}" for each in logprobs[:SHOWN]) + (" …" if len(logprobs) > SHOWN else "")
