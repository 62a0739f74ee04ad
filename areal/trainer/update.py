"""One policy update: from finished groups to an optimizer step for each minibatch.

Groups become one flat batch of trained tokens, each with an advantage and a weight (`token_batch`). The batch is cut
into minibatches of whole groups, everything that the loss compares with is computed under the weights as they are, and
then each minibatch takes one step.

Two sets of log-probs are kept apart. `behaviour` are the sampler's, `proximal` those of the weights before the first
minibatch, computed where needed; a token whose sampler reported nothing has the proximal one for both. The plain loss
takes its ratio against one of them. The decoupled loss clips around the proximal and weighs by its ratio to the
behaviour, which alone is right for recomputed log-probs of samples that may be stale.

Advantages are taken within groups, or against the values of a critic, which then learns from the same minibatches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal.algorithms.advantages import group_advantages, loss_weights
from areal.api.messages import Array, GroupResult, Row, TrainedRow
from areal.config.training import ActorConfig
from areal.engine.training.engine import TokenBatch
from areal.engine.training.figures import Figures
from areal.engine.training.learner import Learner, LogProbs
from areal.engine.training.objective import PolicyObjective
from areal.engine.training.packing import Span
from areal.trainer.critic import PREFIX, ValueUpdate
from areal.trainer.nonfinite import guarded_update
from areal.utils.logging import getLogger

SAME_LOGPROB = 1e-4
"""Two computations of one log-prob that differ by less are the same number in float32."""

TokenValues = Sequence[tuple[Tensor, Tensor]]
"""Numbers of trained tokens, counted through the rows of a batch, and a value for each; part by part."""

logger = getLogger("trainer")


@dataclass(frozen=True)
class UpdateResult:
    figures: dict[str, float]
    rows: list[TrainedRow]
    """In the order of `rows_of_groups`: group by group, episode by episode, every row."""


class PolicyUpdate:
    def __init__(
        self,
        engine: Learner,
        actor: ActorConfig,
        reference: LogProbs | None,
        seed: int,
        *,
        critic: ValueUpdate | None = None,
        directory: Path | None = None,
        stale_samples: bool = False,
        seen_difference: float = 0.0,
        same_arithmetic: bool = True,
    ) -> None:
        """`directory`: where the batch of an update that is not finite is saved; None = nowhere.

        `stale_samples`: they may come from older weights; recomputed log-probs then imply the decoupled loss.
        `seen_difference`: the largest between engine and trainer that this run met before it was resumed.
        `same_arithmetic`: the engine computes as the trainer does; otherwise `auto` recomputes from the first step on.
        """
        self._engine = engine
        self._actor = actor
        self._reference = reference
        self._critic = critic
        self._seed = seed
        self._directory = directory
        self._stale_samples = stale_samples
        self._recompute = actor.recompute_logprob is True or (actor.recompute_logprob == "auto" and not same_arithmetic)
        self._recompute_if_different(seen_difference)

    def step(self, groups: Sequence[GroupResult]) -> UpdateResult:
        """Train on a batch of groups; returns the step's figures, and what was computed for every trained token."""
        rows = rows_of_groups(groups)
        whole = token_batch(rows, self._actor, self._critic)
        count = self._actor.ppo_n_minibatches
        parts = minibatches(whole, count, f"{self._seed}-{self._engine.version}")
        trained, logprobs = [], []
        for number, (part, batch) in enumerate([(part, self._prepare(part)) for part in parts]):
            place = self._engine.version * count + number
            if self._critic is not None:
                trained.append(self._critic.train(part, place=place, step=self._engine.version + 1))
            # Only the first minibatch is computed with the very weights that sampled the newest tokens.
            newest = (batch.fields["versions"] == self._engine.version) & (number == 0)
            batch.fields["checkable"] = newest & ~batch.fields["unreported"]
            tokens, found = batch.fields.pop("tokens"), torch.full_like(batch.temperatures, torch.nan)
            trained.append(self._train(batch, place, found))
            logprobs.append((tokens, batch.fields.get("proximal", found)))
        self._engine.version += 1
        advantages = [(whole.fields["tokens"], whole.fields["advantages"])]
        return UpdateResult(self._figures(trained), trained_rows(rows, logprobs, advantages))

    def _figures(self, trained: Sequence[Figures]) -> Figures:
        """Those of the step from those of its minibatches."""
        figures = Figures.of_minibatches(trained)
        figures["recomputed"] = float(self._recompute)
        if self._critic is not None and self._critic.explained_variance is not None:
            figures[f"{PREFIX}explained_variance"] = self._critic.explained_variance
        checked, summed = figures.pop("checked_tokens", 0.0), figures.pop("sum_logprob_difference", 0.0)
        if checked:
            figures["mean_logprob_difference"] = summed / checked
            self._recompute_if_different(figures["max_logprob_difference"])
        else:  # nothing was compared, which is not a difference of 0
            figures.pop("max_logprob_difference", None)
        return figures

    @property
    def _decoupled(self) -> bool:
        return self._actor.use_decoupled_loss or (self._recompute and self._stale_samples)

    def _prepare(self, batch: TokenBatch) -> TokenBatch:
        """Add everything the loss needs, before the first minibatch changes the weights."""
        if self._critic is not None and self._critic.is_alone(self._engine.version):
            return _select(batch, torch.zeros(len(batch.temperatures), dtype=torch.bool))
        if self._actor.kl_ctl == 0:
            batch = without_zero_advantages(batch)
        if not batch.spans:
            return batch
        unreported = batch.fields["unreported"]
        if self._decoupled or self._recompute or unreported.any():
            proximal = self._engine.logprobs(batch)
            batch.fields["proximal"] = proximal
            batch.fields["behaviour"] = torch.where(unreported, proximal, batch.fields["behaviour"])
        if self._reference is not None:
            batch.fields["reference"] = self._reference.logprobs(batch)
        return batch

    def _train(self, batch: TokenBatch, place: int, logprobs: Tensor) -> Figures:
        """`place` in the learning-rate schedule goes by version, so a step without signal moves it on too.

        `logprobs` [N] takes what the training pass computed.
        """
        return guarded_update(
            self._engine,
            batch,
            PolicyObjective.of(self._actor, decoupled=self._decoupled, recomputed=self._recompute),
            self._actor,
            place=place,
            step=self._engine.version + 1,
            directory=self._directory,
            scores=logprobs,
        )

    def _recompute_if_different(self, difference: float) -> None:
        """With `auto`, stop using the engine's log-probs once they are seen to differ from the trainer's."""
        if self._actor.recompute_logprob == "auto" and not self._recompute and difference > SAME_LOGPROB:
            self._recompute = True
            logger.warning(
                "the engine's log-probs differ from the trainer's by up to %.1e; they are recomputed from now on "
                "(actor.recompute_logprob: auto)",
                difference,
            )


@dataclass
class TrainRow:
    row: Row
    group: int
    """Its task's place in the batch."""
    peers: int
    """The number, through the batch, of the group it is compared within: its task's, or one of several in it."""
    first_completion: int
    """The number, through the batch, of the first completion of the row's episode."""


def rows_of_groups(groups: Sequence[GroupResult]) -> list[TrainRow]:
    """Every row, its completions and the groups that are compared numbered through the batch."""
    episodes = [(number, episode.rows) for number, group in enumerate(groups) for episode in group.episodes]
    numbers = [row.completion_index for _, rows in episodes for row in rows]
    starts = _starts([sum(map(len, (row.completion_index for row in rows))) for _, rows in episodes])
    completions = _starts(np.maximum.reduceat(np.concatenate(numbers), starts) + 1) if episodes else ()
    peers: dict[tuple[int, int | None], int] = {}
    return [
        TrainRow(row, number, peers.setdefault((number, row.group_id), len(peers)), first)
        for (number, rows), first in zip(episodes, map(int, completions), strict=True)
        for row in rows
    ]


def token_batch(rows: Sequence[TrainRow], actor: ActorConfig, critic: ValueUpdate | None = None) -> TokenBatch:
    """Advantages are taken within each group or against a critic's values, weights sum to 1 over the whole batch.

    Truncated completions that are masked count for the advantages of the others.
    """
    lengths = [len(each.row.loss_mask) for each in rows]
    trained = np.flatnonzero(np.concatenate([each.row.loss_mask for each in rows]))
    ends = np.searchsorted(trained, np.cumsum(lengths))
    counts = np.diff(ends, prepend=0)

    def gather(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(each.row, name) for each in rows])[trained])

    def spread(values: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.repeat(values, counts))

    completions = gather("completion_index") + spread([each.first_completion for each in rows])
    peers = spread([each.peers for each in rows])
    fields = {
        "tokens": torch.arange(len(completions)),
        "completions": completions,
        "behaviour": gather("logprobs"),
        "versions": gather("versions"),
        "unreported": spread([each.row.recompute_logprobs for each in rows]),
    }
    places = trained - np.repeat(_starts(lengths), counts)
    spans = [
        Span(each.row.input_ids, places[begin:end], each.group, tuple(each.row.images))
        for each, (begin, end) in zip(rows, pairwise((0, *ends.tolist())), strict=True)
    ]
    batch = TokenBatch(spans, gather("temperatures"), fields)
    returns = gather("returns")
    if critic is not None:
        returns = critic.advantages(batch, returns, completions)
    fields["advantages"] = group_advantages(returns, peers, actor.group_baseline, actor.adv_norm, completions)
    if actor.mask_truncated:
        truncated = np.concatenate([each.row.truncated_tokens() for each in rows])[trained]
        batch = _select(batch, torch.from_numpy(~truncated))
    batch.fields["weights"] = loss_weights(batch.fields.pop("completions"), actor.loss_norm)
    return batch


def trained_rows(rows: Sequence[TrainRow], logprobs: TokenValues, advantages: TokenValues) -> list[TrainedRow]:
    """What was computed for the tokens of each row; NaN where nothing was."""
    ends = np.cumsum([0, *(np.count_nonzero(each.row.loss_mask) for each in rows)]).tolist()

    def by_row(computed: TokenValues) -> list[Array]:
        whole = np.full(ends[-1], np.nan, np.float32)
        for tokens, values in computed:
            whole[tokens.numpy()] = values.numpy()
        return [whole[begin:end] for begin, end in pairwise(ends)]

    return [TrainedRow(*each) for each in zip(by_row(advantages), by_row(logprobs), strict=True)]


def minibatches(batch: TokenBatch, count: int, seed: str) -> list[TokenBatch]:
    """Whole groups, dealt at random but reproducibly; within each minibatch the weights sum to 1 again."""
    groups = sorted({span.group for span in batch.spans})
    random.Random(seed).shuffle(groups)
    count = max(1, min(count, len(groups)))
    home = {group: place % count for place, group in enumerate(groups)}
    homes = _per_token(batch, [home[span.group] for span in batch.spans])
    parts = [_select(batch, homes == number) for number in range(count)]
    for part in parts:
        part.fields["weights"] = part.fields["weights"] / part.fields["weights"].sum()
    return parts


def without_zero_advantages(batch: TokenBatch) -> TokenBatch:
    """Leave out sequences that contribute no gradient; the others keep their weights."""
    number = _per_token(batch, range(len(batch.spans)))
    useful = torch.zeros(len(batch.spans), dtype=torch.bool)
    useful[number[batch.fields["advantages"] != 0]] = True
    return _select(batch, useful[number])


def _select(batch: TokenBatch, kept: Tensor) -> TokenBatch:
    """The tokens that are kept, and the sequences that have any."""
    if not batch.spans or bool(kept.all()):
        return TokenBatch(_with_any(batch.spans), batch.temperatures, dict(batch.fields))
    places = np.flatnonzero(kept.numpy())
    asked = np.concatenate([span.asked for span in batch.spans])[places]
    ends = np.searchsorted(places, np.cumsum([len(span.asked) for span in batch.spans])).tolist()
    spans = [
        Span(span.ids, asked[begin:end], span.group, span.images)
        for span, (begin, end) in zip(batch.spans, pairwise((0, *ends)), strict=True)
    ]
    fields = {name: values[kept] for name, values in batch.fields.items()}
    return TokenBatch(_with_any(spans), batch.temperatures[kept], fields)


def _with_any(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if len(span.asked)]


def _starts(lengths: Sequence[int] | Array) -> Array:
    """Where each of consecutive parts begins."""
    return np.cumsum(lengths) - lengths


def _per_token(batch: TokenBatch, values: Sequence[int]) -> Tensor:
    """Each sequence's value on all its trained tokens."""
    counts = [len(span.asked) for span in batch.spans]
    return torch.from_numpy(np.repeat(np.asarray(values, np.int64), counts))
