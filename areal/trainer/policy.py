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


class PolicyUpdate:
    def __init__(self, engine: TrainingEngine, actor: ActorConfig, reference: TrainingEngine | None, seed: int) -> None:
        self._engine = engine
        self._actor = actor
        self._reference = reference
        self._seed = seed

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
        return {name: _over_minibatches(name, values) for name, values in figures.items()}

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
        needed = torch.ones_like(unreported) if actor.recompute_logprob else unreported
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
        }
        if "reference" in fields:
            kl = (kl_penalty(logprobs, fields["reference"]) * weights).sum()
            loss = loss + actor.kl_ctl * kl
            figures["kl"] = kl.detach()
        return loss, figures


def _over_minibatches(name: str, values: list[float]) -> float:
    if name.startswith("max_"):
        return max(values)
    return sum(values) if name.endswith("_tokens") else sum(values) / len(values)
