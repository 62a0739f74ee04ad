"""Supervised fine-tuning on conversations: `with SFTTrainer(config) as trainer: trainer.train()`.

A task is a conversation (`messages`, optionally `tools`) whose assistant turns are learned. One that ends with a
question and has an `answer` gets the answer as its last turn.
"""

from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal.api.errors import DatasetError
from areal.config.experiment import SFTConfig
from areal.dataset import TaskSource, get_custom_dataset, read_tasks
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.supervised import mean_nll, supervised_batch
from areal.trainer import display
from areal.trainer.checkpoint import load_checkpoint, save_checkpoint
from areal.trainer.display import Announcer, Progress
from areal.trainer.logs import MetricsLog
from areal.trainer.run import Interrupted, Interruption, TrainResult
from areal.trainer.run_directory import RunDirectory, told_in_one_line
from areal.trainer.tasks import Settled, task_stream
from areal.utils.hf_utils import load_hf_tokenizer


class SFTTrainer:
    def __init__(self, config: SFTConfig, train_dataset: TaskSource | None = None) -> None:
        """A dataset given here wins over the one that the config names."""
        self.config = config
        tasks = (
            read_tasks(train_dataset)
            if train_dataset is not None
            else get_custom_dataset("train", dataset_config=config.train_dataset)
        )
        self._examples = [_example(task, number) for number, task in enumerate(tasks)]
        with Announcer() as report:
            self._model = find_model(config.actor.path, report)
        self._tokenizer = load_hf_tokenizer(find_model(config.tokenizer_path) if config.tokenizer_path else self._model)
        self._directory: RunDirectory | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the run's directory."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def train(self) -> TrainResult:
        """Train to the last step or to Ctrl-C; resumes from the newest checkpoint of a run of the same name."""
        directory = self._directory = self._directory or RunDirectory.open(self.config)
        total = self._total_steps()
        engine = TrainingEngine(
            open_trainable(self._model, gradient_checkpointing=self.config.actor.gradient_checkpointing),
            self.config.actor.optimizer,
            total_steps=total,
            max_tokens_per_mb=self.config.actor.max_tokens_per_mb,
        )
        checkpoints = directory.checkpoints()
        first = int(load_checkpoint(checkpoints[-1], engine)["step"]) if checkpoints else 0
        with told_in_one_line(directory.path), Progress(total, first) as progress:
            loss = self._steps(engine, directory, first, total, progress)
            model = self._save(engine, directory, total)
            summary = {"steps": total, "loss": loss}
            directory.finish(summary)
            progress.close()
            progress.say(f"model       {model}\ntalk to it  areal chat {model}")
        return TrainResult(directory.path, model, summary)

    def _steps(
        self, engine: TrainingEngine, directory: RunDirectory, first: int, total: int, progress: Progress
    ) -> float | None:
        """The loss of the last step; None if there was none left to do."""
        size, loss, step = self.config.train_dataset.batch_size, None, first
        stream = task_stream(
            self._examples, self.config.seed, Settled(first * size), shuffle=self.config.train_dataset.shuffle
        )
        try:
            with MetricsLog(directory.path, first + 1) as metrics, Interruption() as interruption:
                for step in range(first + 1, total + 1):
                    batch = [(task["messages"], task["tools"]) for _, task in islice(stream, size)]
                    figures = engine.train_batch(supervised_batch(batch, self._tokenizer), mean_nll)
                    loss = figures["loss"]
                    metrics.write(step, figures)
                    progress.update(step, {"nll": loss})
                    if self.config.saver.freq_steps and step % self.config.saver.freq_steps == 0:
                        self._save(engine, directory, step)
                    interruption.check()
        except Interrupted:
            self._save(engine, directory, step)
            progress.close()
            progress.say(display.stopped(directory.path, step, total))
            raise KeyboardInterrupt from None
        return loss

    def _save(self, engine: TrainingEngine, directory: RunDirectory, step: int) -> Path:
        target = directory.checkpoint(step)
        save_checkpoint(target, engine, self._tokenizer, {"step": step})
        directory.prune(self.config.saver.keep)
        return target

    def _total_steps(self) -> int:
        by_epochs = self.config.total_train_epochs * len(self._examples) // self.config.train_dataset.batch_size
        return self.config.total_train_steps or max(1, by_epochs)


def _example(task: dict[str, Any], number: int) -> dict[str, Any]:
    messages = list(task.get("messages") or ())
    if messages and messages[-1]["role"] != "assistant" and "answer" in task:
        messages.append({"role": "assistant", "content": str(task["answer"])})
    if not any(message["role"] == "assistant" for message in messages):
        raise DatasetError(
            f"a conversation to learn from must have an assistant's turn or an `answer`, number {number} has neither"
        )
    return {"messages": messages, "tools": task.get("tools")}
