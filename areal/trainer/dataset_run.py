"""Training on examples that are given: batches of a dataset in a fixed order, an optimizer step for each.

`DatasetTrainer` opens such a run and `DatasetRun` is its loop. What an example is and what a step learns from some of
them, the trainers of conversations (sft.py) and of pairs (preference.py) say.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

from areal.config.experiment import ExperimentConfig
from areal.dataset import TaskSource, get_custom_dataset, read_tasks
from areal.store.records import StepRecord
from areal.trainer.display import Progress
from areal.trainer.logs import MetricsLog, finite, read_metrics
from areal.trainer.run import RunParts, TrainingRun, TrainingWork, TrainResult
from areal.trainer.tasks import Settled, task_stream
from areal.trainer.trainers import say_what_begins

Example = dict[str, Any]


class DatasetTrainer(TrainingWork):
    def __init__(self, config: ExperimentConfig, tasks: list[Example]) -> None:
        say_what_begins(config, "examples")
        super().__init__(config, tasks)

    def train(self) -> TrainResult:
        """Train to the last step or to Ctrl-C; resumes from the newest checkpoint of a run of the same name."""
        return self._until_no_rank_is_lost(self._attempt)

    @abstractmethod
    def _run(self, parts: RunParts, progress: Progress, metrics: MetricsLog) -> TrainingRun: ...

    def _attempt(self) -> TrainResult:
        with self._open_run(optimizer_steps=self._total_steps) as parts:
            step = parts.standing.step
            with (
                Progress(parts.total_steps, step, quiet=self.config.quiet) as progress,
                MetricsLog(
                    parts.directory.path, step, parts.exporter, board_from=step, trackers=parts.trackers
                ) as metrics,
            ):
                progress.recall(read_metrics(parts.directory.path))
                progress.note("\n".join(self._hello(parts)))
                return self._run(parts, progress, metrics).execute()


def training_tasks(config: ExperimentConfig, given: TaskSource | None) -> list[Example]:
    """A dataset that is given wins over the one that the config names."""
    return read_tasks(given) if given is not None else get_custom_dataset("train", dataset_config=config.train_dataset)


class DatasetRun(TrainingRun):
    def __init__(
        self,
        config: ExperimentConfig,
        parts: RunParts,
        progress: Progress,
        metrics: MetricsLog,
        examples: list[Example],
    ) -> None:
        super().__init__(config, parts, progress)
        self._actor = config.actor
        self._metrics = metrics
        self._batch_size = config.train_dataset.batch_size
        settled = Settled(self._step * self._batch_size)
        self._stream = partial(task_stream, examples, config.seed, settled, shuffle=config.train_dataset.shuffle)
        """The examples from the next step on, each with its place."""
        self._evaluated_every = config.evaluator.freq_steps
        self._loss: float | None = None

    @abstractmethod
    def _learn(self, examples: list[Example]) -> Mapping[str, float]:
        """An optimizer step, the one after `_step`; its figures, the `loss` among them unless it was skipped."""

    def _begin(self) -> None:
        """What is done before the first step of a session."""

    def _evaluate(self) -> None:
        """Measure what was held out, after `_step` steps."""

    def _train(self) -> None:
        self._begin()
        if self._step == 0:
            self._evaluate()
        stream = self._stream()
        while self._step < self._total_steps:
            examples = [task for _, task in islice(stream, self._batch_size)]
            began = time.monotonic()
            figures = self._learn(examples)
            self._between_steps = True
            row = finite({**figures, "train_seconds": time.monotonic() - began})
            self._store.step(StepRecord(self._step + 1, self._step + 1, "", [], row, {}))
            self._step, self._between_steps = self._step + 1, False
            self._loss = figures.get("loss", self._loss)
            self._metrics.write(self._step, row)
            self._progress.update(self._step, {**row, "nll": self._loss})
            if self._due(self._saver.freq_steps):
                self._save()
            if self._due(self._evaluated_every):
                self._evaluate()
            self._interruption.check()
        self._evaluate()

    def _summary(self) -> dict[str, Any]:
        return {"loss": self._loss}
