"""Supervised fine-tuning on conversations: `with SFTTrainer(config) as trainer: trainer.train()`.

A task is a conversation (`messages`, optionally `tools`) whose assistant turns are learned. One that ends with a
question and has an `answer` gets the answer as its last turn.
"""

import time
from itertools import islice
from typing import Any

from areal.api.errors import DatasetError
from areal.config.experiment import SFTConfig
from areal.dataset import TaskSource, get_custom_dataset, read_tasks
from areal.engine.training.supervised import mean_nll, supervised_batch
from areal.store.records import StepRecord
from areal.trainer import display
from areal.trainer.display import Progress
from areal.trainer.logs import MetricsLog, finite
from areal.trainer.nonfinite import guarded_update
from areal.trainer.run import RunParts, Trainer, TrainingRun, TrainResult
from areal.trainer.tasks import Settled, task_stream


class SFTTrainer(Trainer):
    config: SFTConfig

    def __init__(self, config: SFTConfig, train_dataset: TaskSource | None = None) -> None:
        """A dataset given here wins over the one that the config names."""
        tasks = (
            read_tasks(train_dataset)
            if train_dataset is not None
            else get_custom_dataset("train", dataset_config=config.train_dataset)
        )
        super().__init__(config, [_example(task, number) for number, task in enumerate(tasks)])

    def train(self) -> TrainResult:
        """Train to the last step or to Ctrl-C; resumes from the newest checkpoint of a run of the same name."""
        return self._until_no_rank_is_lost(self._attempt)

    def _attempt(self) -> TrainResult:
        with self._open_run(optimizer_steps=self._total_steps) as parts:
            step = parts.standing.step
            with (
                Progress(parts.total_steps, step) as progress,
                MetricsLog(parts.directory.path, step, parts.exporter, board_from=step) as metrics,
            ):
                progress.say(display.hello(parts.directory.path, step))
                return _SFTRun(self.config, parts, progress, metrics, self._tasks).execute()


class _SFTRun(TrainingRun):
    def __init__(
        self,
        config: SFTConfig,
        parts: RunParts,
        progress: Progress,
        metrics: MetricsLog,
        examples: list[dict[str, Any]],
    ) -> None:
        super().__init__(config, parts, progress)
        self._actor = config.actor
        self._metrics = metrics
        self._batch_size = config.train_dataset.batch_size
        settled = Settled(self._step * self._batch_size)
        self._examples = task_stream(examples, config.seed, settled, shuffle=config.train_dataset.shuffle)
        self._loss: float | None = None

    def _train(self) -> None:
        while self._step < self._total_steps:
            batch = [(task["messages"], task["tools"]) for _, task in islice(self._examples, self._batch_size)]
            began = time.monotonic()
            figures = guarded_update(
                self._engine,
                supervised_batch(batch, self._tokenizer),
                mean_nll,
                self._actor,
                place=self._step,
                step=self._step + 1,
                directory=self._directory.path,
            )
            self._between_steps = True
            row = finite({**figures, "train_seconds": time.monotonic() - began})
            self._store.step(StepRecord(self._step + 1, self._step + 1, "", [], row, {}))
            self._step, self._between_steps = self._step + 1, False
            self._loss = figures.get("loss", self._loss)
            self._metrics.write(self._step, row)
            self._progress.update(self._step, {"nll": self._loss})
            if self._due(self._saver.freq_steps):
                self._save()
            self._interruption.check()

    def _summary(self) -> dict[str, Any]:
        return {"loss": self._loss}


def _example(task: dict[str, Any], number: int) -> dict[str, Any]:
    messages = list(task.get("messages") or ())
    if messages and messages[-1]["role"] != "assistant" and "answer" in task:
        messages.append({"role": "assistant", "content": str(task["answer"])})
    if not any(message["role"] == "assistant" for message in messages):
        raise DatasetError(
            f"a conversation to learn from must have an assistant's turn or an `answer`, number {number} has neither"
        )
    return {"messages": messages, "tools": task.get("tools")}
