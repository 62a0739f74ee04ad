"""Learning from pairs of answers: `DPOTrainer` trains a policy on them, `RewardTrainer` a model that scores answers.

A task has a `prompt` (a text or messages; `messages` means the same), a `chosen` and a `rejected` answer, each a text
or messages, and optionally `tools`. An answer whose messages do not begin with the assistant is a whole conversation,
and what the two begin with alike is the prompt.

Each step first computes the scores of its pairs, without gradients. They fix the loss and what each token's score
counts in its gradient (areal/algorithms/preference.py), and the passes that train may cut the batch in any way.
"""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from areal.algorithms.preference import JudgedPairs, bradley_terry, dpo
from areal.api.errors import DatasetError
from areal.api.messages import Array
from areal.config.experiment import DPOConfig, RewardConfig
from areal.dataset import TaskSource, get_custom_dataset, read_tasks
from areal.dataset.sources import with_messages
from areal.engine.models import find_model
from areal.engine.training.engine import TokenBatch
from areal.engine.training.learner import LogProbs
from areal.engine.training.pairs import (
    Pair,
    WeightedScores,
    answers_of_pairs,
    ends_of_pairs,
    lengths_of_pairs,
    spread_over_pairs,
    sums_of_pairs,
)
from areal.store.reader import StoreReader
from areal.trainer import notices
from areal.trainer.dataset_run import DatasetRun, DatasetTrainer, Example, training_tasks
from areal.trainer.display import Progress
from areal.trainer.learners import opened_frozen
from areal.trainer.logs import MetricsLog, finite
from areal.trainer.nonfinite import guarded_update
from areal.trainer.run import RunParts
from areal.trainer.tasks import digest_of_tasks

REFERENCE_FILE = "reference.npz"


class PairTrainer(DatasetTrainer):
    """What both have in common."""

    config: DPOConfig | RewardConfig

    def __init__(
        self,
        config: DPOConfig | RewardConfig,
        train_dataset: TaskSource | None = None,
        valid_dataset: TaskSource | None = None,
    ) -> None:
        """Datasets given here win over those that the config names."""
        tasks = training_tasks(config, train_dataset)
        if valid_dataset is not None:
            held_out = read_tasks(valid_dataset, "test")
        else:
            named = config.valid_dataset.path
            held_out = get_custom_dataset("test", dataset_config=config.valid_dataset) if named else []
        self._valid = [read_pair(task, number) for number, task in enumerate(held_out)]
        self._pairs = [read_pair(task, number) for number, task in enumerate(tasks)]
        super().__init__(config, [{"pair": number, **vars(pair)} for number, pair in enumerate(self._pairs)])


class PairRun(DatasetRun):
    def __init__(
        self,
        config: DPOConfig | RewardConfig,
        parts: RunParts,
        progress: Progress,
        metrics: MetricsLog,
        examples: list[Example],
        *,
        pairs: Sequence[Pair],
        valid: Sequence[Pair],
    ) -> None:
        """`pairs` are those that the `examples` number."""
        super().__init__(config, parts, progress, metrics, examples)
        self._label_smoothing = config.label_smoothing
        self._pairs = [*pairs, *valid]
        """By number, those that are held out last."""
        self._held_out = range(len(pairs), len(self._pairs))
        with StoreReader(parts.directory.path) as reader:
            self._evaluations = {each["step"]: each["result"] for each in reader.evaluations()}

    @abstractmethod
    def _asked(self, pairs: Sequence[Pair]) -> TokenBatch:
        """Pairs as spans, two by two."""

    @abstractmethod
    def _judged(self, numbers: Sequence[int], batch: TokenBatch) -> JudgedPairs:
        """Pairs and their spans, under the present weights."""

    def _learn(self, examples: list[Example]) -> Mapping[str, float]:
        batch, judged = self._compared([example["pair"] for example in examples])
        batch.fields["coefficients"] = spread_over_pairs(batch, judged.slopes / len(examples))
        trained = guarded_update(
            self._engine,
            batch,
            WeightedScores(),
            self._actor,
            place=self._step,
            step=self._step + 1,
            directory=self._directory.path,
        )
        return trained if trained["skipped_updates"] else {**trained, **judged.means()}

    def _compared(self, numbers: Sequence[int]) -> tuple[TokenBatch, JudgedPairs]:
        batch = self._asked([self._pairs[number] for number in numbers])
        return batch, self._judged(numbers, batch)

    def _evaluate(self) -> None:
        if not self._held_out or self._step in self._evaluations:
            return
        parts = [self._held_out[at : at + self._batch_size] for at in range(0, len(self._held_out), self._batch_size)]
        found = [(len(part), self._compared(part)[1].means()) for part in parts]
        total = sum(count for count, _ in found)
        means = {name: sum(count * each[name] for count, each in found) / total for name in found[0][1]}
        self._evaluations[self._step] = means
        row = finite({f"eval_{name}": value for name, value in means.items()})
        self._store.evaluation(self._step, row, {"key": f"step {self._step}", "result": means, "account": {}})
        self._metrics.write(self._step, row)
        self._progress.update(self._step, row)

    def _summary(self) -> dict[str, Any]:
        known = sorted(self._evaluations)
        held_out = {"before": known[0], "after": known[-1]} if known else {}
        return {**super()._summary(), "held_out": {when: self._evaluations[step] for when, step in held_out.items()}}

    def _verdicts(self, summary: dict[str, Any]) -> list[str]:
        held_out = summary["held_out"]
        if not held_out:
            return []
        before, after = (held_out[when]["accuracy"] for when in ("before", "after"))
        count = len(self._held_out)
        return [f"of {count} held-out pairs, the chosen answer is ahead in {before:.1%} before and {after:.1%} after"]


class DPOTrainer(PairTrainer):
    """`with DPOTrainer(config) as trainer: trainer.train()`."""

    config: DPOConfig

    def _run(self, parts: RunParts, progress: Progress, metrics: MetricsLog) -> "_DPORun":
        return _DPORun(
            self.config, parts, progress, metrics, self._tasks, pairs=self._pairs, valid=self._valid, start=self._model
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "beta": self.config.beta, "ref.path": self.config.ref.path}


class _DPORun(PairRun):
    def __init__(self, config: DPOConfig, *arguments: Any, start: Path, **keywords: Any) -> None:
        """`start`: the model that the run began with."""
        super().__init__(config, *arguments, **keywords)
        self._beta, self._nll_weight = config.beta, config.nll_weight
        self._starts_from_reference = config.ref.path in ("", config.actor.path)
        self._reference_path = start if self._starts_from_reference else find_model(config.ref.path)
        self._reference = ReferenceSums(
            self._directory.path / REFERENCE_FILE,
            len(self._pairs),
            f"{self._reference_path} {self._fingerprint} {digest_of_tasks([vars(pair) for pair in self._pairs])}",
        )

    def _asked(self, pairs: Sequence[Pair]) -> TokenBatch:
        return answers_of_pairs(pairs, self._tokenizer)

    def _judged(self, numbers: Sequence[int], batch: TokenBatch) -> JudgedPairs:
        sums, reference = self._sums(self._engine, batch), self._reference.of(numbers)
        return dpo(sums, reference, lengths_of_pairs(batch), self._beta, self._label_smoothing, self._nll_weight)

    def _begin(self) -> None:
        """Compute what the reference says of all pairs that the run will meet; it need not be kept then."""
        left = (self._total_steps - self._step) * self._batch_size
        ahead = islice(self._stream(), min(left, 2 * len(self._pairs)))  # two epochs have every pair
        missing = self._reference.missing([*{task["pair"]: None for _, task in ahead}, *self._held_out])
        if not missing:
            return
        with self._progress.spinner(f"computing what the reference says of {len(missing)} pairs"):
            is_engine = (
                self._starts_from_reference and not self._actor.lora.path
            )  # else with what an adapter has learnt
            if is_engine and self._step == 0:
                self._compute_reference(self._engine, missing)
            else:
                with opened_frozen(self._actor, self._reference_path, self._engine) as reference:
                    self._compute_reference(reference, missing)

    def _compute_reference(self, reference: LogProbs, missing: Sequence[int]) -> None:
        try:
            for at in range(0, len(missing), self._batch_size):
                numbers = missing[at : at + self._batch_size]
                batch = self._asked([self._pairs[number] for number in numbers])
                self._reference.put(numbers, self._sums(reference, batch))
                self._interruption.check()
        finally:
            self._reference.save()

    def _sums(self, model: LogProbs, batch: TokenBatch) -> Tensor:
        return sums_of_pairs(batch, model.logprobs(batch))


class RewardTrainer(PairTrainer):
    """`with RewardTrainer(config) as trainer: trainer.train()`; what it saves is a `reward_fn: model:DIRECTORY`."""

    config: RewardConfig
    value_head: ClassVar[bool] = True

    def _run(self, parts: RunParts, progress: Progress, metrics: MetricsLog) -> "_RewardRun":
        return _RewardRun(self.config, parts, progress, metrics, self._tasks, pairs=self._pairs, valid=self._valid)


class _RewardRun(PairRun):
    def _asked(self, pairs: Sequence[Pair]) -> TokenBatch:
        return ends_of_pairs(pairs, self._tokenizer)

    def _judged(self, numbers: Sequence[int], batch: TokenBatch) -> JudgedPairs:
        return bradley_terry(sums_of_pairs(batch, self._engine.values(batch)), self._label_smoothing)

    def _places(self, model: Path, curve: Path | None) -> list[str]:
        return [*notices.places(self._directory.path, model, curve)[:-1], f"use it      reward_fn=model:{model}"]


class ReferenceSums:
    """What the reference says of each pair, by number: computed once and kept in the run's directory."""

    def __init__(self, path: Path, count: int, identity: str) -> None:
        """A file that was made for another `identity` is not used."""
        self._path = path
        self._identity = identity
        self._sums: Array = np.full((count, 2), np.nan)
        if path.exists():
            with np.load(path) as kept:
                if str(kept["identity"]) == identity:
                    self._sums = kept["sums"]

    def missing(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if np.isnan(self._sums[number]).any()]

    def put(self, numbers: Sequence[int], sums: Tensor) -> None:
        self._sums[list(numbers)] = sums.numpy()

    def of(self, numbers: Sequence[int]) -> Tensor:
        """[P,2]"""
        return torch.from_numpy(self._sums[list(numbers)])

    def save(self) -> None:
        fresh = self._path.with_suffix(".tmp")
        with fresh.open("wb") as file:
            np.savez(file, identity=self._identity, sums=self._sums)
        os.replace(fresh, self._path)


def read_pair(task: Example, number: int) -> Pair:
    """Raises DatasetError if the task is no pair."""

    def refuse(problem: str) -> DatasetError:
        return DatasetError(f"pair {number} {problem}; give it a `prompt`, a `chosen` and a `rejected` answer")

    missing = [name for name in ("chosen", "rejected") if task.get(name) in (None, [])]
    if missing:
        raise refuse(f"has no {' and no '.join(missing)}")
    prompt = list(with_messages(task).get("messages") or ())
    conversations = []
    for name in ("chosen", "rejected"):
        given = task[name]
        answer = [{"role": "assistant", "content": given}] if isinstance(given, str) else list(given)
        conversation = [*prompt, *answer] if answer[0]["role"] == "assistant" else answer
        if conversation[-1]["role"] != "assistant":
            raise refuse(f"must end with an assistant's turn, its {name} answer ends with {conversation[-1]['role']!r}")
        conversations.append(conversation)
    chosen, rejected = conversations
    if _alike(chosen, rejected):
        raise refuse("has the same answer twice")
    shared = next((at for at, both in enumerate(zip(chosen, rejected, strict=False)) if not _alike(*both)), None)
    shared = min(len(chosen), len(rejected)) - 1 if shared is None else shared
    if shared == 0:
        raise refuse("has no prompt")
    return Pair(chosen, rejected, shared, task.get("tools"))


def _alike(left: Any, right: Any) -> bool:
    return json.dumps(left, sort_keys=True, default=str) == json.dumps(right, sort_keys=True, default=str)
