"""One policy update: which log-probs the ratio is taken against, in how many minibatches, under which loss."""

import random
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.algorithms.ppo import clipped_loss, decoupled_loss, kl_penalty
from areal.api.messages import GroupResult
from areal.config.actor import ActorConfig
from areal.engine.training import TokenBatch, TrainingEngine
from areal.trainer.batch import TrainRow, rows_of_groups, token_batch, without_zero_advantages


class PolicyUpdate:
    def __init__(self, engine: TrainingEngine, actor: ActorConfig, reference: TrainingEngine | None, seed: int) -> None:
        self._engine = engine
        self._actor = actor
        self._reference = reference
        self._seed = seed

    def step(self, groups: Sequence[GroupResult]) -> dict[str, float]:
        """Train on a batch of groups; returns figures, averaged over minibatches."""
        figures: dict[str, list[float]] = defaultdict(list)
        batches = [self._prepare(rows) for rows in self._minibatches(rows_of_groups(groups))]
        for number, batch in enumerate(batches):
            fresh = torch.tensor(number == 0)
            batch.fields["checkable"] = (batch.fields.pop("versions") == self._engine.version) & fresh
            for name, value in self._train(batch).items():
                figures[name].append(value)
        self._engine.version += 1
        return {name: _over_minibatches(name, values) for name, values in figures.items()}

    def _train(self, batch: TokenBatch) -> dict[str, float]:
        if not batch.spans:
            return {"loss": 0.0, "grad_norm": 0.0, "forward_tokens": 0.0}
        return self._engine.train_batch(batch, self._loss)

    def _minibatches(self, rows: list[TrainRow]) -> list[list[TrainRow]]:
        """Whole groups, dealt at random but reproducibly."""
        groups = sorted({row.group for row in rows})
        random.Random(f"{self._seed}-{self._engine.version}").shuffle(groups)
        count = min(self._actor.ppo_n_minibatches, len(groups))
        home = {group: place % count for place, group in enumerate(groups)}
        return [[row for row in rows if home[row.group] == number] for number in range(count)]

    def _prepare(self, rows: list[TrainRow]) -> TokenBatch:
        """Everything the loss needs, computed before the first minibatch changes the weights."""
        batch = token_batch(rows, self._actor)
        if self._actor.kl_ctl == 0:
            batch = without_zero_advantages(batch)
        if not batch.spans:
            return batch
        unknown = _tokens_without_logprobs(rows, batch)
        if self._actor.recompute_logprob or unknown.any():
            present = self._engine.logprobs(batch)
            use = torch.ones_like(unknown) if self._actor.recompute_logprob else unknown
            batch.fields["logprobs"] = torch.where(use, present, batch.fields["logprobs"])
        if self._actor.use_decoupled_loss:
            batch.fields["proximal"] = self._engine.logprobs(batch)
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


def _tokens_without_logprobs(rows: list[TrainRow], batch: TokenBatch) -> Tensor:
    """Which trained tokens came without log-probs."""
    unknown = {id(each.row.input_ids) for each in rows if each.row.recompute_logprobs}
    flags = [torch.full((len(span.asked),), id(span.ids) in unknown) for span in batch.spans]
    return torch.cat(flags)
