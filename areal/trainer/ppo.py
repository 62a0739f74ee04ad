"""Train an agent's model by reinforcement: `with PPOTrainer(config) as trainer: trainer.train(workflow=...)`."""

from types import TracebackType
from typing import Any, Self

from areal.config.experiment import PPOConfig
from areal.dataset import TaskSource, get_custom_dataset, read_tasks
from areal.engine.models import find_model
from areal.rollout.loading import Workflow, WorkflowSpec, check
from areal.trainer.display import Announcer
from areal.trainer.run import GroupFilter, RunPlan, Tasks, TrainingRun, TrainResult
from areal.trainer.run_directory import RunDirectory


class PPOTrainer:
    def __init__(
        self, config: PPOConfig, train_dataset: TaskSource | None = None, valid_dataset: TaskSource | None = None
    ) -> None:
        """Datasets given here win over those that the config names. A built-in model is made now if it must be."""
        self.config = config
        self._tasks = read_tasks(train_dataset) if train_dataset is not None else self._configured("train")
        self._valid = read_tasks(valid_dataset, "test") if valid_dataset is not None else self._configured("valid")
        with Announcer() as report:
            self._model = find_model(config.actor.path, report)
        self._tokenizer = find_model(config.tokenizer_path) if config.tokenizer_path else self._model
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

    def train(
        self,
        workflow: Workflow,
        eval_workflow: Workflow | None = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: GroupFilter | None = None,
    ) -> TrainResult:
        """Train to the last step, or to Ctrl-C; everything is saved either way."""
        train_spec = WorkflowSpec(workflow, workflow_kwargs or {})
        eval_spec = WorkflowSpec(eval_workflow, eval_workflow_kwargs or {}) if eval_workflow is not None else train_spec
        check(train_spec)
        check(eval_spec)
        self._directory = self._directory or RunDirectory.open(self.config)
        plan = RunPlan(
            config=self.config,
            directory=self._directory,
            model=self._model,
            tokenizer=self._tokenizer,
            tasks=self._tasks,
            valid=self._valid,
            total_steps=self._total_steps(),
            workflow=train_spec,
            eval_workflow=eval_spec,
            keep=dynamic_filter_fn,
        )
        return TrainingRun(plan).execute()

    def _configured(self, which: str) -> Tasks:
        dataset = self.config.train_dataset if which == "train" else self.config.valid_dataset
        if which == "valid" and not dataset.path:
            return []
        return get_custom_dataset("train" if which == "train" else "test", dataset_config=dataset)

    def _total_steps(self) -> int:
        by_epochs = self.config.total_train_epochs * len(self._tasks) // self.config.train_dataset.batch_size
        return self.config.total_train_steps or max(1, by_epochs)
