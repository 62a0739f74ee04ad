"""One policy update: which log-probs the ratio is taken against, in how many minibatches, under which loss."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.algorithms.ppo import clipped_loss, decoupled_loss, kl_penalty
from areal.api.messages import GroupResult
from areal.config.actor import ActorConfig
from areal.engine.training import TokenBatch, TrainingEngine
from areal.trainer.batch import minibatches, rows_of_groups, token_batch, without_zero_advantages
from areal.utils.logging import getLogger

SAME_LOGPROB = 1e-4
"""Two computations of one log-prob that differ by less are the same number in float32."""

logger = getLogger("trainer")


class PolicyUpdate:
    def __init__(
        self,
        engine: TrainingEngine,
        actor: ActorConfig,
        reference: TrainingEngine | None,
        seed: int,
        *,
        seen_difference: float = 0.0,
        same_arithmetic: bool = True,
    ) -> None:
        """`seen_difference`: the largest between engine and trainer that this run met before it was resumed.

        `same_arithmetic`: the engine computes as the trainer does; otherwise `auto` recomputes from the first step on.
        """
        self._engine = engine
        self._actor = actor
        self._reference = reference
        self._seed = seed
        self._recompute = actor.recompute_logprob is True or (actor.recompute_logprob == "auto" and not same_arithmetic)
        self._distrust(seen_difference)

    def step(self, groups: Sequence[GroupResult]) -> dict[str, float]:
        """Train on a batch of groups; returns figures, averaged over minibatches."""
        whole = token_batch(rows_of_groups(groups), self._actor)
        parts = minibatches(whole, self._actor.ppo_n_minibatches, f"{self._seed}-{self._engine.version}")
        figures: dict[str, list[float]] = defaultdict(list)
        for number, batch in enumerate([self._prepare(part) for part in parts]):
            # Only the first minibatch is computed with the very weights that sampled the newest tokens.
            batch.fields["checkable"] = (batch.fields["versions"] == self._engine.version) & (number == 0)
            for name, value in self._train(batch).items():
                figures[name].append(value)
        self._engine.version += 1
        told = {name: _over_minibatches(name, values) for name, values in figures.items()}
        self._judge(told)
        return told

    def _judge(self, figures: dict[str, float]) -> None:
        """Turn the summed differences into a mean, and stop trusting the sampler's numbers if they are not ours."""
        checked, summed = figures.pop("checked_tokens", 0.0), figures.pop("sum_logprob_difference", 0.0)
        figures["mean_logprob_difference"] = summed / checked if checked else 0.0
        self._distrust(figures.get("max_logprob_difference", 0.0))

    def _distrust(self, difference: float) -> None:
        if self._actor.recompute_logprob == "auto" and not self._recompute and difference > SAME_LOGPROB:
            self._recompute = True
            logger.warning(
                "the engine's log-probs differ from the trainer's by up to %.1e; they are recomputed from now on "
                "(actor.recompute_logprob: auto)",
                difference,
            )

    def _train(self, batch: TokenBatch) -> dict[str, float]:
        if not batch.spans:
            return {"loss": 0.0, "grad_norm": 0.0, "forward_tokens": 0.0}
        return self._engine.train_batch(batch, self._loss)

    def _prepare(self, batch: TokenBatch) -> TokenBatch:
        """Everything the loss needs, computed before the first minibatch changes the weights."""
        actor = self._actor
        if actor.kl_ctl == 0:
            batch = without_zero_advantages(batch)
        if not batch.spans:
            return batch
        unreported = batch.fields["unreported"]
        needed = torch.ones_like(unreported) if self._recompute else unreported
        if actor.use_decoupled_loss or needed.any():
            present = self._engine.logprobs(batch)
            batch.fields["logprobs"] = torch.where(needed, present, batch.fields["logprobs"])
            batch.fields["proximal"] = present
        if self._reference is not None:
            batch.fields["reference"] = self._reference.logprobs(batch)
        return batch

    def _loss(self, logprobs: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        actor, weights = self._actor, fields["weights"]
        low, high = actor.eps_clip, actor.eps_clip_higher or actor.eps_clip
        behaviour = fields["logprobs"]
        if actor.use_decoupled_loss:
            policy = decoupled_loss(
                logprobs, fields["proximal"], behaviour, fields["advantages"], low, high, actor.behave_imp_weight_cap
            )
        else:
            policy = clipped_loss(logprobs, behaviour, fields["advantages"], low, high)
        loss = (policy.loss * weights).sum()
        difference = (logprobs.detach() - behaviour).abs() * fields["checkable"]
        figures = {
            "clip_ratio": (policy.clipped * weights).sum(),
            "trained_tokens": torch.tensor(len(weights)),
            "max_logprob_difference": difference.max(),
            "sum_logprob_difference": difference.sum(),
            "checked_tokens": fields["checkable"].sum(),
        }
        if "reference" in fields:
            kl = (kl_penalty(logprobs, fields["reference"]) * weights).sum()
            loss = loss + actor.kl_ctl * kl
            figures["kl"] = kl.detach()
        return loss, figures


def _over_minibatches(name: str, values: list[float]) -> float:
    if name.startswith("max_"):
        return max(values)
    is_sum = name.startswith("sum_") or name.endswith("_tokens")
    return sum(values) if is_sum else sum(values) / len(values)
