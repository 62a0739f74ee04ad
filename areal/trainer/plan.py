"""What a run is made from, and what it leaves. Plain values; nothing happens here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.config.experiment import PPOConfig
from areal.rollout.workflows import WorkflowSpec
from areal.trainer.run_directory import RunDirectory

Tasks = list[dict[str, Any]]
GroupFilter = Callable[[dict[str, Any]], bool]
"""Given a group's tensor dict, whether to train on it."""


@dataclass(frozen=True)
class Plan:
    config: PPOConfig
    directory: RunDirectory
    model: Path
    tokenizer: Path
    tasks: Tasks
    valid: Tasks
    """Held-out tasks; empty = nothing is evaluated."""
    total_steps: int
    workflow: WorkflowSpec
    eval_workflow: WorkflowSpec
    keep: GroupFilter | None

    @property
    def total_groups(self) -> int:
        return self.total_steps * self.config.train_dataset.batch_size


@dataclass(frozen=True)
class TrainResult:
    run_dir: Path
    model_dir: Path
    summary: dict[str, Any]
