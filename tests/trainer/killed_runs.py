"""A run of the whole trainer, with its real pipeline and store, whose agents and engine are stand-ins in its process.

`train(output_dir, model, moment)` goes on until that moment comes and then kills its process, or to the end if the
moment is `never`. Every group that an agent begins is a line in OUTPUT_DIR/begun, and what is printed is in
OUTPUT_DIR/printed.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fleet_of_groups import Agent, ppo_config
from small_runs import make_group

from areal import PPOTrainer
from areal.api.engine_api import WeightUpdate
from areal.api.messages import GroupResult, GroupTask
from areal.config.experiment import DatasetConfig, PPOConfig
from areal.config.rollout import RolloutConfig
from areal.config.training import SaverConfig
from areal.rollout.dispatch import GroupWorker
from areal.store.reader import StoreReader
from areal.store.writer import StoreWriter
from areal.trainer import checkpoint, logs, ppo
from areal.trainer.cluster import Cluster
from areal.trainer.fleet import Fleet
from areal.trainer.learners import open_learner, policy_update
from areal.trainer.logs import read_lines

STALENESS = 2
BATCH = 2
STEPS = 6
TASKS = [{"question": str(number)} for number in range(40)]
HOLD_SECONDS = 20.0


def config_of(output_dir: Path, model: Path) -> PPOConfig:
    """A checkpoint after every third step; up to six groups in flight."""
    return ppo_config(
        output_dir,
        model,
        total_train_steps=STEPS,
        train_dataset=DatasetConfig(batch_size=BATCH),
        rollout=RolloutConfig(max_head_offpolicyness=STALENESS, max_concurrent_rollouts=100),
        saver=SaverConfig(freq_steps=3, keep=2),
    )


class Engines:
    """An engine that has the weights as soon as they are published."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.changed = asyncio.Condition()

    @property
    def version(self) -> int:
        return max(self.digests)

    async def publish(self, update: WeightUpdate) -> None:
        async with self.changed:
            self.digests[update.version] = update.digest
            self.changed.notify_all()

    async def activity(self) -> list[tuple[float, float]]:
        return []

    async def pauses(self) -> list[float]:
        return []

    def give_up(self) -> None:
        return

    async def close(self) -> None:
        return


class Worker(GroupWorker):
    """Every third group lasts until there is a new version, unless nothing else runs: some always run, or are stale."""

    def __init__(self, engines: Engines, begun: Path, on_start: Callable[[int], None]) -> None:
        self._engines = engines
        self._begun = begun
        self._on_start = on_start
        self._quick = 0

    async def run_group(self, task: GroupTask) -> GroupResult:
        first = self._engines.version
        with self._begun.open("a") as file:
            file.write(f"{task.task_id}\n")
        self._on_start(task.task_id)
        async with self._engines.changed:
            if task.task_id % 3 == 2:
                async with asyncio.timeout(HOLD_SECONDS):
                    await self._engines.changed.wait_for(lambda: self._engines.version > first or not self._quick)
            else:
                self._quick += 1
        await asyncio.sleep(0)
        async with self._engines.changed:
            if task.task_id % 3 != 2:
                self._quick -= 1
            self._engines.changed.notify_all()
        group = make_group(task.task_id, [0, 1, 0, 1])
        for episode in group.episodes:
            for row in episode.rows:
                row.versions[row.loss_mask] = self._engines.version
                row.versions[row.loss_mask.argmax()] = first
        group.digests = {version: self._engines.digests[version] for version in (first, self._engines.version)}
        return group


class FleetOfWorkers(Fleet):
    """The fleet of a run without processes: everything but what runs the model is the real thing."""

    def __init__(
        self, config: PPOConfig, *rest: Any, logs: Path, on_start: Callable[[int], None], **others: Any
    ) -> None:
        self._config = config
        self.cluster = Cluster(config.scheduler, logs, [])
        self._owns_cluster = True
        self._processes = self.cluster.processes
        self._pipeline = None
        self._local = None
        self._status = None
        self._following = set()
        engines = self.cluster.wait(self._make_engines())
        self._engines: Any = engines
        self._workers: Any = [Worker(engines, Path(config.output_dir) / "begun", on_start)]
        self._weights = Path(config.output_dir) / f"weights-{os.getpid()}"
        self._weights.mkdir()

    async def _make_engines(self) -> Engines:
        return Engines()

    @property
    def shared_memory(self) -> Path:
        return self._weights


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, when: Callable[..., bool], act: Callable[[], None] = die) -> None:
    """Act before a call of `owner.name` for whose arguments `when` holds."""
    real = getattr(owner, name)

    def watched(*args: Any, **settings: Any) -> Any:
        if when(*args):
            act()
        return real(*args, **settings)

    setattr(owner, name, watched)


def after(owner: Any, name: str, when: Callable[..., bool], act: Callable[[], None] = die) -> None:
    """Act after such a call."""
    real = getattr(owner, name)

    def watched(*args: Any, **settings: Any) -> Any:
        result = real(*args, **settings)
        if when(*args):
            act()
        return result

    setattr(owner, name, watched)


WHEN_GROUPS_RUN = "when groups run"
MOMENTS: dict[str, Callable[[], None]] = {
    "never": lambda: None,
    "before the first commit": lambda: before(StoreWriter, "step", lambda _, record: record.step == 1),
    "before a later commit": lambda: before(StoreWriter, "step", lambda _, record: record.step == 5),
    "between commit and publish": lambda: before(Fleet, "publish", lambda _, update: update.version == 2),
    "before a step is exported": lambda: before(logs.RolloutLog, "write", lambda _, step, *rest: step == 2),
    "between two exports": lambda: after(logs.RolloutLog, "write", lambda _, step, *rest: step == 4),
    "between publish and checkpoint": lambda: before(ppo._PPORun, "_save", lambda run: run._step == 3),
    "during the first checkpoint": lambda: before(checkpoint, "_seal", lambda directory: True),
    "between a checkpoint and its name in the store": lambda: before(
        StoreWriter, "checkpoint", lambda _, step, *rest: step == 3
    ),
    "when groups wait": lambda: before(
        Fleet, "take", lambda fleet, count: _waiting(fleet) > 0 and _version(fleet) >= 4
    ),
    WHEN_GROUPS_RUN: lambda: None,
    "before the summary": lambda: before(ppo._PPORun, "_finish", lambda run: True),
}


def _waiting(fleet: Fleet) -> int:
    return fleet._running.admission.ready


def _version(fleet: Fleet) -> int:
    return fleet._running.admission.version


def train(output_dir: Path, model: Path, moment: str) -> None:
    printed = os.open(output_dir / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(printed, standard)
    sys.stdout, sys.stderr = (open(standard, "w", buffering=1) for standard in (1, 2))  # noqa: SIM115
    MOMENTS[moment]()
    last_start = 7 if moment == WHEN_GROUPS_RUN else None

    def on_start(task_id: int) -> None:
        if task_id == last_start:
            die()

    run(output_dir, model, on_start)


def run(output_dir: Path, model: Path, on_start: Callable[[int], None] = lambda task_id: None) -> None:
    torch.set_num_threads(1)
    ppo.Fleet = partial(FleetOfWorkers, on_start=on_start)  # type: ignore[assignment,misc]
    with PPOTrainer(config_of(output_dir, model), TASKS) as trainer:
        trainer.train(workflow=Agent)


def check_record(run_dir: Path) -> None:
    """Each step is everywhere once, each task in one of them, none older than allowed."""
    steps = list(range(1, STEPS + 1))
    with StoreReader(run_dir) as reader:
        assert [each.step for each in reader.steps()] == steps
        batches = {step: [group.task_id for group in reader.batch(step) or []] for step in steps}
        for step in steps:
            for group in reader.batch(step) or []:
                assert step - 1 - group.oldest_version <= STALENESS
        assert reader.states().get("retry", 0) + reader.states().get("running", 0) == 0
    trained = [task_id for batch in batches.values() for task_id in batch]
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    metrics = [row["step"] for row in read_lines(run_dir / "metrics.jsonl")]
    assert metrics == steps
    exported = [(row["step"], row["task_id"]) for row in read_lines(run_dir / "rollouts.jsonl")]
    assert exported == [(step, task_id) for step, batch in batches.items() for task_id in batch for _ in range(4)]
    assert (run_dir / "summary.json").exists()


def check_weights(output_dir: Path, model: Path, run_dir: Path) -> None:
    """They are those of a run that trains the same batches without an interruption, to the bit."""
    torch.set_num_threads(1)  # as the run did, whatever another test has set
    config = config_of(output_dir, model)
    engine = open_learner(config, model, STEPS * config.actor.ppo_n_minibatches, None)
    update = policy_update(config, engine, None)
    with StoreReader(run_dir) as reader:
        for stored in reader.steps():
            update.step(reader.batch(stored.step) or [])
            assert engine.publish(config.rollout.dtype).digest == stored.digest, f"step {stored.step}"
    engine.close()
