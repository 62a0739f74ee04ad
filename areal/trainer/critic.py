"""The critic's half of an update: what it expected of a batch, and a step of its own on each minibatch.

Values are those of the weights before the first minibatch, as proximal log-probs are. They become advantages, and with
these the targets that the critic then learns.
"""

from pathlib import Path

from torch import Tensor

from areal.algorithms.values import Turns, explained_variance, gae
from areal.config.training import ActorConfig, CriticConfig
from areal.engine.training.engine import TokenBatch
from areal.engine.training.figures import Figures
from areal.engine.training.learner import Critic
from areal.engine.training.objective import ValueObjective
from areal.trainer.nonfinite import guarded_update

PREFIX = "critic/"
"""How the critic's figures begin."""


class ValueUpdate:
    def __init__(
        self,
        engine: Critic,
        config: CriticConfig,
        actor: ActorConfig,
        *,
        turn_discount: float = 1.0,
        directory: Path | None = None,
    ) -> None:
        """`turn_discount`: that of the returns. `directory`: where the batch of an update that is not finite is saved;
        None = nowhere."""
        self._engine = engine
        self._config = config
        self._actor = actor
        self._turn_discount = turn_discount
        self._directory = directory
        self.explained_variance: float | None = None
        """Of the discounted returns of the newest batch, by the values before it; None = the returns are equal."""

    def advantages(self, batch: TokenBatch, returns: Tensor, discount: float, gae_lambda: float) -> Tensor:
        """Advantages [N], not normalised; `old_values` and `targets` are added to the batch's fields.

        They go through turns if the batch has a field `parents`.
        """
        values, completions = self._engine.values(batch), batch.fields["completions"]
        parents = batch.fields.get("parents")
        turns = None if parents is None else Turns(parents, self._turn_discount)
        received = values + gae(returns, values, completions, discount, turns=turns)
        self.explained_variance = explained_variance(values, received)
        estimates = gae(returns, values, completions, discount, gae_lambda, turns)
        batch.fields["old_values"] = values
        batch.fields["targets"] = (values + estimates).to(values.dtype)
        return estimates.to(values.dtype)

    def is_alone(self, version: int) -> bool:
        """Whether only the critic learns yet."""
        return version < self._config.warmup_steps

    def train(self, batch: TokenBatch, *, place: int, step: int) -> Figures:
        """One optimizer step on a minibatch; `place` and `step` as in `guarded_update`."""
        fields = {name: batch.fields[name] for name in ("weights", "old_values", "targets")}
        return guarded_update(
            self._engine,
            TokenBatch(batch.spans, batch.temperatures, fields),
            ValueObjective(self._config.eps_clip),
            self._actor,
            place=place,
            step=step,
            directory=self._directory,
            of_critic=True,
        ).under(PREFIX)
