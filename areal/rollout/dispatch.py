"""Sends tasks to rollout workers: each to the one with the least to do, under a deadline, and checks what comes back.

A group that is lost with its worker or its engine is sent again. It comes back once: what is lost never answers.
Owns how loaded each worker is, which weights each version may have, and what blocked the workers' event loops. Knows
nothing of batches, staleness or training.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import cloudpickle

from areal.api.errors import GroupLost, WeightMismatch, WorkflowError
from areal.api.messages import GroupResult, GroupTask
from areal.infra.stalls import StallLog
from areal.utils.logging import getLogger
from areal.utils.waits import Waits

logger = getLogger("rollout")


class GroupWorker(Protocol):
    """A worker that inherits this is always there."""

    @property
    def present(self) -> bool:
        """False while it is being started again."""
        return True

    async def until_present(self) -> None:
        return

    async def run_group(self, task: GroupTask) -> GroupResult:
        """Raises GroupLost if the worker, or the engine, ends meanwhile."""
        ...

    async def unasked_groups(self) -> list[int]:
        """Tasks of the training groups here of which no sample has asked the model for anything; it may leave some
        out."""
        return []


class Dispatch:
    def __init__(self, workers: Sequence[GroupWorker], group_seconds: float | None) -> None:
        """`group_seconds`: a worker that takes longer for a group is stuck; None = trust its episodes' own deadline."""
        self.weights = WeightCheck()
        self.stalls = StallLog()
        self.sent = Waits()
        """The groups that are with workers."""
        self._workers = list(workers)
        self._load = Counter[int]()
        self._group_seconds = group_seconds

    async def send(
        self, task: GroupTask, at_worker: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> GroupResult:
        """Raises what the worker raises, `WeightMismatch`, or `WorkflowError` if the worker is stuck.

        `at_worker` is entered each time that a worker gets the group, and left when it ends or is lost.
        """
        while True:
            try:
                result = await self._run(task, at_worker)
                break
            except GroupLost as lost:
                logger.debug("the group of task %d runs again: %s", task.task_id, lost)
        self.weights.check(result.digests)
        for stall in result.stalls:
            self.stalls.end(stall, logged=stall.process == os.getpid())
        return result

    async def unasked_groups(self) -> list[int]:
        """Those of all workers that are there."""
        answers = await asyncio.gather(*(worker.unasked_groups() for worker in self._workers if worker.present))
        return [task_id for answer in answers for task_id in answer]

    async def _run(self, task: GroupTask, at_worker: Callable[[], AbstractContextManager[None]]) -> GroupResult:
        workers = self._workers
        index = min(range(len(workers)), key=lambda i: (not workers[i].present, self._load[i]))
        self._load[index] += task.n_samples
        deadline = asyncio.timeout(None)
        try:
            await workers[index].until_present()
            with at_worker(), self.sent.entered(f"task {task.task_id}", self._group_seconds):
                async with asyncio.timeout(self._group_seconds) as deadline:
                    return await workers[index].run_group(task)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise WorkflowError(
                f"rollout worker {index} gave no answer for {self._group_seconds:g} s, longer than its episodes may "
                "take; usually the workflow blocks its event loop (time.sleep, a synchronous request), and the "
                "worker's log names the line"
            ) from None
        finally:
            self._load[index] -= task.n_samples


class WeightCheck:
    """Compares the weights that the trainer published with those that engines report to have used.

    An engine may use a version a moment before its publication is known here. What it reports of such a version is kept
    and compared when the publication comes.
    """

    def __init__(self) -> None:
        self.published: dict[int, str] = {}
        """version -> digest"""
        self._unpublished: dict[int, str] = {}
        """What engines reported of versions that are not published yet."""

    def publish(self, version: int, digest: str) -> None:
        """Raises WeightMismatch if an engine already used something else under that number, or one before it."""
        self.published[version] = digest
        reported, self._unpublished = self._unpublished, {}
        self.check(reported)

    def check(self, reported: dict[int, str]) -> None:
        """`reported` is what an engine says of the versions that it sampled tokens with."""
        newest = max(self.published, default=-1)
        for version, digest in reported.items():
            known = self.published.get(version)
            if known is None and version > newest:
                known = self._unpublished.setdefault(version, digest)
            if known != digest:
                raise WeightMismatch(
                    f"the engine says that version {version} has the weights {digest}, published were "
                    f"{known or 'none of that version'}; a stale engine or a second trainer is using this run"
                )


def pack_task(data: dict[str, Any]) -> bytes:
    """A task's dict as bytes; what its values are made of in `__main__` travels by value."""
    try:
        packed: bytes = cloudpickle.dumps(data)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise WorkflowError(
            f"a task cannot be sent to a rollout worker: {type(error).__name__}: {error}; tasks are dicts of plain data"
        ) from error
    return packed
