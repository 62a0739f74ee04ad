"""A fleet without processes: tasks become ready-made groups, and publishing may fail. For runs of the whole trainer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import byte_tokenizer, make_group

from areal import PPOTrainer
from areal.api.engine_api import WeightUpdate
from areal.api.errors import EngineError
from areal.api.messages import GroupResult
from areal.config.experiment import DatasetConfig, PPOConfig
from areal.config.rollout import GenerationHyperparameters
from areal.config.training import SaverConfig
from areal.rollout.admission import Admission
from areal.rollout.pipeline import GroupRecord, NoRecord, Tally
from areal.trainer import ppo
from areal.trainer.run import TrainResult
from areal.utils.closing import Closing

TASKS = [{"question": str(number)} for number in range(40)]


class Agent:
    """Never called."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        raise NotImplementedError


class FleetOfGroups(Closing):
    """Stands in for `Fleet`. `fails_at`: the version whose publication the engine refuses."""

    def __init__(self, fails_at: int | None = None, evaluate: Callable[..., list[GroupResult]] | None = None) -> None:
        self.rejections = SimpleNamespace(counts=Counter[str]())
        self.stalls: list[str] = []
        self.expiring_wait_seconds = 0.0
        self.shared_memory: Path | None = None
        """None = the engine finds a place for its weights itself."""
        self.taken: list[int] = []
        self.expiring_wait_seconds = 0.0
        self._fails_at = fails_at
        self._evaluate = evaluate
        self._tasks: Iterator[tuple[int, dict[str, Any]]] = iter(())
        self._version = 0
        self._digest = ""
        self._record: GroupRecord = NoRecord()
        self._ready: list[GroupResult] = []

    def begin(
        self,
        tasks: Iterator[tuple[int, dict[str, Any]]],
        admission: Admission,
        keep: object,
        record: GroupRecord,
        ready: Sequence[GroupResult],
    ) -> None:
        self._tasks = tasks
        self._record = record
        self._ready = list(ready)

    def take(self, count: int) -> list[GroupResult]:
        groups, self._ready = self._ready[:count], self._ready[count:]
        count -= len(groups)
        for task_id, _ in (next(self._tasks) for _ in range(count)):
            group = make_group(task_id, [0, 1, 0, 1])
            for episode in group.episodes:
                for row in episode.rows:
                    row.versions[row.loss_mask] = self._version
            group.digests = {self._version: self._digest}
            self._record.ready(group)
            groups.append(group)
            self.taken.append(task_id)
        return groups

    def publish(self, update: WeightUpdate) -> None:
        if update.version == self._fails_at:
            raise EngineError("the engine refuses the weights")
        self._version, self._digest = update.version, update.digest

    def evaluate(self, tasks: Sequence[dict[str, Any]], **how: Any) -> list[GroupResult]:
        assert self._evaluate is not None
        return self._evaluate(tasks, **how)

    def pop_lost(self) -> tuple[list[int], Tally]:
        return [], Tally()

    def cpu_seconds(self) -> dict[str, float]:
        return {"driver": 0.0}

    def engine_activity(self) -> list[tuple[float, float]]:
        return []

    def engine_pauses(self) -> list[float]:
        return []

    def close(self) -> None:
        pass


def ppo_config(output_dir: Path, model: Path, **settings: Any) -> PPOConfig:
    """Four steps of two groups; a checkpoint after each."""
    config = PPOConfig(
        experiment_name="test",
        trial_name="one",
        output_dir=str(output_dir),
        total_train_steps=4,
        train_dataset=DatasetConfig(batch_size=2),
        gconfig=GenerationHyperparameters(n_samples=4),
        saver=SaverConfig(freq_steps=1, keep=5),
    )
    config.actor.path = str(model)
    return replace(config, **settings)


def run(
    config: PPOConfig,
    monkeypatch: pytest.MonkeyPatch,
    fleet: FleetOfGroups | None = None,
    tasks: Sequence[dict[str, Any]] = TASKS,
    valid: Sequence[dict[str, Any]] | None = None,
) -> TrainResult:
    """Train on a fleet without processes."""
    monkeypatch.setattr(ppo, "Fleet", lambda *args, **settings: fleet or FleetOfGroups())
    with PPOTrainer(config, tasks, valid) as trainer:
        return trainer.train(workflow=Agent)


def save_model(directory: Path, engine: Any) -> Path:
    engine.save(str(directory))
    byte_tokenizer().save_pretrained(directory)
    return directory
