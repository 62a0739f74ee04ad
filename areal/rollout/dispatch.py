"""Which weights each version stands for: what the trainer published against what the engine says it used.

An engine may use a version a moment before its publication is known here. What it says of such a version is kept, and
compared when the publication comes.
"""

# MERGED-DOC
# Sends tasks to workers: each to the one with the least to do, under a deadline, and checks who answered.
#
# Owns how loaded each worker is. Knows nothing of batches, staleness or training.

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle

from areal.api.errors import WeightMismatch, WorkflowError
from areal.api.messages import GroupResult, GroupTask, Stall
from areal.infra.stalls import StallBook, over
from areal.utils.logging import getLogger


@dataclass
class WeightCheck:
    published: dict[int, str] = field(default_factory=dict)
    """version -> digest"""
    claimed: dict[int, str] = field(default_factory=dict)
    """What an engine said of versions that are not yet published."""

    def publish(self, version: int, digest: str) -> None:
        """Raises WeightMismatch if an engine already used something else under that number, or one before it."""
        self.published[version] = digest
        due = {number: said for number, said in self.claimed.items() if number <= version}
        self.claimed = {number: said for number, said in self.claimed.items() if number > version}
        self.check(due)

    def check(self, digests: dict[int, str]) -> None:
        """`digests` is what an engine says of the versions behind its tokens."""
        newest = max(self.published, default=-1)
        for version, said in digests.items():
            known = self.published.get(version)
            if known is None and version > newest:
                known = self.claimed.setdefault(version, said)
            if known != said:
                raise WeightMismatch(
                    f"the engine says that version {version} has the weights {said}, published were "
                    f"{known or 'none of that version'}; a stale engine or a second trainer is using this run"
                )


logger = getLogger("rollout")


class GroupWorker(Protocol):
    async def run_group(self, task: GroupTask) -> GroupResult: ...


class Dispatch:
    def __init__(self, workers: Sequence[GroupWorker], group_seconds: float | None) -> None:
        """`group_seconds`: a worker that takes longer for a group is stuck; None = trust its episodes' own deadline."""
        self.lineage = WeightCheck()
        self.stalls = StallBook()
        """What blocked the workers' event loops."""
        self._workers = list(workers)
        self._load = Counter[int]()
        self._group_seconds = group_seconds

    async def send(self, task: GroupTask) -> GroupResult:
        """Raises what the worker raises, `WeightMismatch`, or `WorkflowError` if it is stuck."""
        index = min(range(len(self._workers)), key=lambda i: self._load[i])
        self._load[index] += task.n_samples
        deadline = asyncio.timeout(self._group_seconds)
        try:
            async with deadline:
                result = await self._workers[index].run_group(task)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise WorkflowError(
                f"rollout worker {index} gave no answer for {self._group_seconds:g} s, longer than its episodes may "
                "take; a workflow that blocks its event loop (time.sleep, a synchronous request) does that, and "
                "its log then names the line"
            ) from None
        finally:
            self._load[index] -= task.n_samples
        self.lineage.check(result.digests)
        for stall in result.stalls:
            self._note(stall)
        return result

    def _note(self, stall: Stall) -> None:
        if stall.process != os.getpid() and self.stalls.is_news(stall):
            logger.warning("%s", over(stall))
        self.stalls.add(stall)


def pack_task(data: dict[str, Any]) -> bytes:
    """A task's dict in bytes; what its values are made of in `__main__` travels by value."""
    try:
        packed: bytes = cloudpickle.dumps(data)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise WorkflowError(
            f"a task cannot be sent to a rollout worker: {type(error).__name__}: {error}; tasks are dicts of plain data"
        ) from error
    return packed
