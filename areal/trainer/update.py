"""One policy update: from finished groups to an optimizer step for each minibatch.

Groups become one flat batch of trained tokens (batch.py), which the stages of the algorithm (areal/algorithms/) give
advantages, corrections and weights. The batch is cut into minibatches of whole groups, everything that the loss
compares with is computed under the weights as they are, and then each minibatch takes one step.

Two sets of log-probs are kept apart. `behaviour` are the sampler's, `proximal` those of the weights before the first
minibatch, computed where needed; a token whose sampler reported nothing has the proximal one for both. The plain loss
takes its ratio against one of them. The decoupled loss clips around the proximal and weighs by its ratio to the
behaviour, which alone is right for recomputed log-probs of samples that may be stale.

Advantages are taken within groups, or against the values of a critic, which then learns from the same minibatches, or
from what a teacher thinks of each token.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from areal.algorithms.advantage import kl_costs
from areal.algorithms.correction import correct
from areal.algorithms.ratio import Completions, log_ratios
from areal.algorithms.stages import stage
from areal.api.messages import GroupResult, TrainedRow
from areal.config.presets import resolve
from areal.config.training import ActorConfig
from areal.engine.training.choices import ChoiceReader
from areal.engine.training.engine import TokenBatch
from areal.engine.training.figures import Figures
from areal.engine.training.learner import Learner, LogProbs
from areal.engine.training.objective import PolicyObjective
from areal.engine.training.token_sets import FIELD
from areal.trainer.batch import (
    completion_tokens,
    has_split_completions,
    minibatches,
    rows_of_groups,
    select,
    token_batch,
    token_parents,
    trained_rows,
    useful_tokens,
    with_advantages,
    without_forced,
    without_truncated,
)
from areal.trainer.critic import PREFIX, ValueUpdate
from areal.trainer.nonfinite import guarded_update
from areal.trainer.teacher import TeacherUpdate
from areal.trainer.update_figures import batch_figures, token_figures, weight_figures
from areal.utils.logging import getLogger

SAME_LOGPROB = 1e-4
"""Two computations of one log-prob that differ by less are the same number in float32."""
LEARNED = ("weights", "advantages", "behaviour", "proximal", "correction", "reference", "versions", "checkable", FIELD)
"""Fields that the model or the loss is given, or whoever looks at the batch of an update that was not finite."""

logger = getLogger("trainer")


@dataclass(frozen=True)
class UpdateResult:
    figures: dict[str, float]
    rows: list[TrainedRow]
    """In the order of `rows_of_groups`: group by group, episode by episode, every row."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What it took, by what it was spent on."""


class PolicyUpdate:
    def __init__(
        self,
        engine: Learner,
        actor: ActorConfig,
        reference: LogProbs | None,
        seed: int,
        *,
        critic: ValueUpdate | None = None,
        teacher: TeacherUpdate | None = None,
        choices: ChoiceReader | None = None,
        directory: Path | None = None,
        stale_samples: bool = False,
        seen_difference: float = 0.0,
        same_arithmetic: bool = True,
        max_new_tokens: int = 512,
    ) -> None:
        """`choices`: reads what tokens were drawn from; None = only what needs no tokenizer can be read.
        `directory`: where the batch of an update that is not finite is saved; None = nowhere.

        `stale_samples`: they may come from older weights; recomputed log-probs then imply the decoupled loss.
        `seen_difference`: the largest between engine and trainer that this run met before it was resumed.
        `same_arithmetic`: the engine computes as the trainer does; otherwise `auto` recomputes from the first step on.
        `max_new_tokens`: of a completion.
        """
        self._engine = engine
        self._actor = actor
        self._algorithm = resolve(
            actor, stale=stale_samples, reference=reference is not None, max_new_tokens=max_new_tokens
        ).algorithm
        self._reference = reference
        self._critic = critic
        self._teacher = teacher
        self._choices = choices or ChoiceReader()
        self._seed = seed
        self._directory = directory
        self._stale_samples = stale_samples
        self._max_new_tokens = max_new_tokens
        self._seconds: dict[str, float] = {}
        """What the present step has taken, by what it was spent on."""
        self._recompute = actor.recompute_logprob is True or (actor.recompute_logprob == "auto" and not same_arithmetic)
        self._recompute_if_different(seen_difference)

    def step(self, groups: Sequence[GroupResult]) -> UpdateResult:
        """Train on a batch of groups; returns the step's figures, and what was computed for every trained token."""
        self._seconds = {}
        rows = rows_of_groups(groups)
        batch = token_batch(rows, self._choices)
        if self._critic is not None and self._algorithm.gae_over == "episode":
            batch.fields["parents"] = token_parents(batch, rows, groups)
        described = batch_figures(batch, self._engine.version)
        whole, weighed = self._prepare(batch)
        count = self._actor.ppo_n_minibatches
        parts = minibatches(whole, count, f"{self._seed}-{self._engine.version}", self._algorithm)
        trained, tokens = [], []
        for number, part in enumerate(parts):
            place = self._engine.version * count + number
            if self._critic is not None:
                with self._timed("critic"):
                    trained.append(self._critic.train(part, place=place, step=self._engine.version + 1))
            batch = select(part, part.fields["kept"])
            # Only the first minibatch is computed with the very weights that sampled the newest tokens.
            newest = (batch.fields["versions"] == self._engine.version) & (number == 0)
            batch.fields["checkable"] = newest & ~batch.fields["unreported"]
            found, entropies = torch.full((2, len(batch.temperatures)), torch.nan)
            with self._timed("gradient"):
                trained.append(self._train(batch, place, found, entropies))
            tokens.append((batch, found, entropies))
        explained = token_figures(tokens, self._engine.version)
        self._engine.version += 1
        advantages = [(whole.fields["tokens"], whole.fields["advantages"])]
        logprobs = [(batch.fields["tokens"], batch.fields.get("proximal", found)) for batch, found, _ in tokens]
        spreads = [(batch.fields["tokens"], spread) for batch, _, spread in tokens]
        figures = {**self._figures(trained, len(whole.temperatures)), **described, **weighed, **explained}
        return UpdateResult(figures, trained_rows(rows, logprobs, advantages, spreads), self._seconds)

    def _figures(self, trained: Sequence[Figures], tokens: int) -> Figures:
        """Those of the step from those of its minibatches; `tokens` are those that might have been trained."""
        figures = Figures.of_minibatches(trained)
        figures["recomputed"] = float(self._recompute)
        if self._critic is not None and self._critic.explained_variance is not None:
            figures[f"{PREFIX}explained_variance"] = self._critic.explained_variance
        if self._teacher is not None and self._teacher.reverse_kl is not None:
            figures["teacher_kl"] = self._teacher.reverse_kl
        low, high, dual, ratios = (
            figures.pop(f"sum_{name}", 0.0) for name in ("clipped_low", "clipped_high", "dual_clipped", "ratio")
        )
        if count := figures.get("trained_tokens"):
            figures |= {"ratio_mean": ratios / count, "clip_ratio": (low + high) / tokens}
            figures |= {"clip_low_ratio": low / tokens, "clip_high_ratio": high / tokens}
            figures["dual_clip_ratio"] = dual / tokens
            if "sum_kl" in figures:
                figures["kl"] = figures.pop("sum_kl") / count
        checked, summed = figures.pop("checked_tokens", 0.0), figures.pop("sum_logprob_difference", 0.0)
        if checked:
            figures["mean_logprob_difference"] = summed / checked
            self._recompute_if_different(figures["max_logprob_difference"])
        else:  # nothing was compared, which is not a difference of 0
            figures.pop("max_logprob_difference", None)
        return figures

    @property
    def _decoupled(self) -> bool:
        return self._algorithm.use_decoupled_loss or (self._recompute and self._stale_samples)

    def _prepare(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        """Add everything the loss needs, before the first minibatch changes the weights; and figures of that."""
        algorithm = self._algorithm
        if self._reference is not None and algorithm.kl_in != "loss":
            batch = self._with_kl_in_returns(batch, self._reference)
        figures = {"kl": float(batch.fields["kl"].mean())} if "kl" in batch.fields else {}
        whole = with_advantages(batch, algorithm, self._max_new_tokens, self._critic)
        if self._teacher is not None:
            with self._timed("teacher"):
                self._teacher.teach(whole)
        if self._actor.mask_truncated:
            whole = without_truncated(whole)
        whole = without_forced(whole)
        kept = self._kept(whole)
        whole.fields["kept"] = kept
        needs_proximal = self._decoupled or self._recompute or bool((whole.fields["unreported"] & kept).any())
        needs_reference = self._reference is not None and algorithm.kl_in == "loss"
        if not (needs_proximal or needs_reference) or not bool(kept.any()):
            return whole, figures
        trained = select(whole, kept)
        if needs_proximal:
            unreported = trained.fields["unreported"]
            proximal = trained.fields.get("proximal")
            proximal = self._scored("proximal", self._engine, trained) if proximal is None else proximal
            trained.fields["proximal"] = proximal
            trained.fields["behaviour"] = torch.where(unreported, proximal, trained.fields["behaviour"])
        if self._reference is not None and needs_reference:
            trained.fields["reference"] = self._scored("reference", self._reference, trained)
        if self._decoupled:
            figures |= self._correct(trained)
        for name in ("behaviour", "proximal", "reference", "correction"):
            if name in trained.fields:
                found = trained.fields[name]
                whole.fields[name] = found.new_full(kept.shape, torch.nan).masked_scatter(kept, found)
        return whole, figures

    def _kept(self, batch: TokenBatch) -> Tensor:
        """Which tokens the actor learns from [N], bool."""
        if self._critic is not None and self._critic.is_alone(self._engine.version):
            return torch.zeros(len(batch.temperatures), dtype=torch.bool)
        penalised = self._reference is not None and self._algorithm.kl_in == "loss"
        if penalised or self._algorithm.entropy_coef:
            return torch.ones(len(batch.temperatures), dtype=torch.bool)
        return useful_tokens(batch)

    def _with_kl_in_returns(self, batch: TokenBatch, reference: LogProbs) -> TokenBatch:
        """Returns less what the KL to the reference costs; the log-probs that it is taken of are kept."""
        algorithm, fields = self._algorithm, batch.fields
        proximal = self._scored("proximal", self._engine, batch)
        difference = proximal.double() - self._scored("reference", reference, batch).double()
        kl = stage("kl", algorithm.kl)(difference, torch.zeros_like(difference))
        costs = kl_costs(kl, fields["completions"], fields["positions"], per_token=algorithm.kl_in == "token_reward")
        returns = fields["returns"] - (algorithm.kl_ctl * costs).to(fields["returns"].dtype)
        return replace(batch, fields={**fields, "returns": returns, "proximal": proximal, "kl": kl})

    def _correct(self, batch: TokenBatch) -> dict[str, float]:
        """Add the weights by which the decoupled loss is multiplied; returns their figures."""
        fields, algorithm = batch.fields, self._algorithm
        log_weights = fields["proximal"].double() - fields["behaviour"].double()
        completions = Completions.of(fields["completions"])
        weights = stage("correction", algorithm.correction)(log_weights, fields["advantages"], completions)
        found = correct(weights, log_weights, fields["advantages"], completions, algorithm)
        fields["correction"] = found.weights.to(fields["proximal"].dtype)
        return weight_figures(found)

    def _train(self, batch: TokenBatch, place: int, logprobs: Tensor, entropies: Tensor) -> Figures:
        """`place` in the learning-rate schedule goes by version, so a step without signal moves it on too.

        `logprobs` [N] and `entropies` [N] take what the training pass computed.
        """
        fields = {name: batch.fields[name] for name in LEARNED if name in batch.fields}
        if self._algorithm.ratio != "token" and batch.spans:
            fields |= self._completion_fields(batch)
        return guarded_update(
            self._engine,
            replace(batch, fields=fields),
            PolicyObjective(self._algorithm, decoupled=self._decoupled, recomputed=self._recompute),
            self._actor,
            place=place,
            step=self._engine.version + 1,
            directory=self._directory,
            scores=logprobs,
            entropies=entropies,
        )

    def _completion_fields(self, batch: TokenBatch) -> dict[str, Tensor]:
        """What a ratio of whole completions needs.

        A sequence is never cut, so a pass may have a part of a completion only if that lies in several sequences. Then
        the log-ratios of the rest are computed beforehand.
        """
        completions = batch.fields["completions"]
        fields = {"completions": completions, "completion_tokens": completion_tokens(completions)}
        if has_split_completions(batch):
            anchor = batch.fields["proximal" if self._decoupled or self._recompute else "behaviour"]
            present = self._scored("present", self._engine, batch)
            fields["whole_log_ratio"] = Completions.of(completions).sum(log_ratios(present, anchor))
        return fields

    def _scored(self, name: str, model: LogProbs, batch: TokenBatch) -> Tensor:
        with self._timed(name):
            return model.logprobs(batch)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def _recompute_if_different(self, difference: float) -> None:
        """With `auto`, stop using the engine's log-probs once they are seen to differ from the trainer's."""
        if self._actor.recompute_logprob == "auto" and not self._recompute and difference > SAME_LOGPROB:
            self._recompute = True
            logger.warning(
                "the engine's log-probs differ from the trainer's by up to %.1e; they are recomputed from now on "
                "(actor.recompute_logprob: auto)",
                difference,
            )
