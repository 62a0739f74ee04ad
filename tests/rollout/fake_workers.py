"""Workers without episodes, for tests of what is between them and the trainer."""

import asyncio
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from areal.api.errors import RejectReason
from areal.api.messages import Episode, GroupResult, GroupTask, Rejection, Row
from areal.rollout.admission import Admission
from areal.rollout.dispatch import GroupWorker
from areal.rollout.pipeline import Pipeline

DEADLINE_SECONDS = 20


def row(version: int) -> Row:
    zeros = np.zeros(3, np.float32)
    return Row(
        input_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=zeros,
        versions=np.array([-1, version, version + 1], np.int32),
        returns=zeros,
        completion_index=np.array([-1, 0, 0], np.int32),
        temperatures=zeros + 1,
        reward=1.0,
    )


def group(task_id: int, version: int = 0, episodes: int = 1, rejected: int = 0, digests: Any = None) -> GroupResult:
    rejections = [Rejection(RejectReason.AGENT_ERROR, "Agent raised KeyError: 'x'") for _ in range(rejected)]
    return GroupResult(task_id, [Episode([row(version)], 1.0) for _ in range(episodes)], rejections, digests or {})


class HeldWorker:
    """Holds every group until the test gives its result, or the error to raise."""

    def __init__(self) -> None:
        self.present = True
        self.tasks: list[GroupTask] = []
        self.cancelled: list[int] = []
        self.unasked: set[int] = set()
        """Tasks of which the test says that they have asked the model for nothing."""
        self._held: dict[int, asyncio.Future[GroupResult]] = {}
        self._changed = asyncio.Event()

    @property
    def running(self) -> list[int]:
        return list(self._held)

    async def until_present(self) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not self.present:
                self._changed.clear()
                await self._changed.wait()

    def come_back(self) -> None:
        self.present = True
        self._changed.set()

    async def run_group(self, task: GroupTask) -> GroupResult:
        self.tasks.append(task)
        self._held[task.task_id] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            return await self._held[task.task_id]
        except asyncio.CancelledError:
            self.cancelled.append(task.task_id)
            raise
        finally:
            del self._held[task.task_id]
            self._changed.set()

    async def unasked_groups(self) -> list[int]:
        return [task_id for task_id in self._held if task_id in self.unasked]

    def finish(self, result: GroupResult) -> None:
        self._held[result.task_id].set_result(result)

    def break_down(self, task_id: int, error: Exception) -> None:
        self._held[task_id].set_exception(error)

    async def until_running(self, *task_ids: int) -> None:
        """Wait until just these groups are here."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while set(self._held) != set(task_ids):
                self._changed.clear()
                await self._changed.wait()


class PromptWorker(GroupWorker):
    """Finishes every group at once, under the version that `version()` says; counts how many episodes run."""

    def __init__(self, pipeline_version: Any) -> None:
        self._version = pipeline_version
        self.seen: list[int] = []

    async def run_group(self, task: GroupTask) -> GroupResult:
        self.seen.append(pickle.loads(task.data)["number"])
        return group(task.task_id, self._version(), task.n_samples)


def numbered_tasks() -> Iterator[tuple[int, dict[str, Any]]]:
    return ((number, {"number": number}) for number in itertools.count())


def make_pipeline(workers: list[Any], *, tasks: Any = None, n_samples: int = 1, **options: Any) -> Pipeline:
    bounds = {"batch_size": 2, "max_staleness": 1, "max_running": 100, "total_groups": 1000}
    bounds |= {"consumed": 0, "when_stale": "wait"}
    admission = Admission(**{key: options.pop(key, value) for key, value in bounds.items()})
    settings = {"max_idle_rejections": 100, **options}
    return Pipeline(workers, admission, tasks or numbered_tasks(), n_samples=n_samples, **settings)
