"""Supervised fine-tuning on conversations: `with SFTTrainer(config) as trainer: trainer.train()`.

A task is a conversation (`messages`, optionally `tools`) whose assistant turns are learned. One that ends with a
question and has an `answer` gets the answer as its last turn.
"""

from areal.api.errors import DatasetError
from areal.config.experiment import SFTConfig
from areal.dataset import TaskSource
from areal.engine.training.figures import Figures
from areal.engine.training.supervised import mean_nll, supervised_batch
from areal.trainer.dataset_run import DatasetRun, DatasetTrainer, Example, training_tasks
from areal.trainer.display import Progress
from areal.trainer.logs import MetricsLog
from areal.trainer.nonfinite import guarded_update
from areal.trainer.run import RunParts


class SFTTrainer(DatasetTrainer):
    config: SFTConfig

    def __init__(self, config: SFTConfig, train_dataset: TaskSource | None = None) -> None:
        """A dataset given here wins over the one that the config names."""
        tasks = training_tasks(config, train_dataset)
        super().__init__(config, [_example(task, number) for number, task in enumerate(tasks)])

    def _run(self, parts: RunParts, progress: Progress, metrics: MetricsLog) -> "_SFTRun":
        return _SFTRun(self.config, parts, progress, metrics, self._tasks)


class _SFTRun(DatasetRun):
    def _learn(self, examples: list[Example]) -> Figures:
        batch = supervised_batch([(task["messages"], task["tools"]) for task in examples], self._tokenizer)
        return guarded_update(
            self._engine,
            batch,
            mean_nll,
            self._actor,
            place=self._step,
            step=self._step + 1,
            directory=self._directory.path,
        )


def _example(task: Example, number: int) -> Example:
    messages = list(task.get("messages") or ())
    if messages and messages[-1]["role"] != "assistant" and "answer" in task:
        messages.append({"role": "assistant", "content": str(task["answer"])})
    if not any(message["role"] == "assistant" for message in messages):
        raise DatasetError(
            f"a conversation to learn from must have an assistant's turn or an `answer`, number {number} has neither"
        )
    return {"messages": messages, "tools": task.get("tools")}
