"""The driver's half: tasks go out to workers as admission allows, finished groups come back and are handed over.

Everything happens on one event loop and is driven by events: a group that ends and a version that is published each
lead to the next admission at once. Nothing polls.
"""

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal.api.errors import NothingAccepted, WeightMismatch
from areal.api.messages import GroupResult, GroupTask, Rejection
from areal.api.rejection import RejectReason
from areal.rollout.admission import Admission
from areal.utils import logging

logger = logging.getLogger("rollout")

TRACES_SHOWN = 2
"""Full tracebacks logged per reason; the rest are only counted."""


class Worker(Protocol):
    async def run_group(self, task: GroupTask) -> GroupResult: ...


@dataclass
class Tally:
    """Rejected episodes: how many, why, and the first of each kind."""

    counts: Counter[RejectReason] = field(default_factory=Counter)
    since_accepted: int = 0
    latest: Rejection | None = None

    def add(self, rejection: Rejection) -> None:
        self.counts[rejection.reason] += 1
        self.since_accepted += 1
        self.latest = rejection
        if self.counts[rejection.reason] <= TRACES_SHOWN and rejection.reason is not RejectReason.STALE:
            logger.warning("rejected (%s): %s\n%s", rejection.reason, rejection.detail, rejection.trace)


Filter = Callable[[GroupResult], bool]
"""Whether a finished group is to be trained on."""
TaskStream = Iterator[tuple[int, dict[str, Any]]]
"""(number, task), endless."""


class Pipeline:
    """Keeps episodes in flight and hands over batches of groups."""

    def __init__(
        self,
        workers: Sequence[Worker],
        admission: Admission,
        tasks: TaskStream,
        *,
        n_samples: int,
        max_idle_rejections: int,
        keep: Filter | None = None,
    ) -> None:
        self.admission = admission
        self.tally = Tally()
        self._workers = list(workers)
        self._load = Counter[int]()
        self._tasks = tasks
        self._n_samples = n_samples
        self._max_idle_rejections = max_idle_rejections
        self._keep = keep
        self._ready: list[GroupResult] = []
        self._running: set[asyncio.Task[None]] = set()
        self._published: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._evaluations = 0

    def publish(self, version: int, digest: str) -> None:
        """The engine now has these weights; older groups may expire and new ones be admitted."""
        self._published[version] = digest
        self.admission.version = version
        self._expire()
        self._admit()

    async def take(self, count: int) -> list[GroupResult]:
        """The next `count` groups, oldest first, none staler than allowed."""
        while len(self._ready) < count:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        self._ready.sort(key=oldest_version)
        batch, self._ready = self._ready[:count], self._ready[count:]
        self.admission.consume(count)
        return batch

    async def evaluate(self, tasks: Sequence[dict[str, Any]], *, greedy: bool, max_running: int) -> list[GroupResult]:
        """Each task once, in order, beside whatever is being trained on; rejections are part of the results."""
        room = asyncio.Semaphore(max_running)

        async def one(data: dict[str, Any]) -> GroupResult:
            async with room:
                self._evaluations += 1
                task = GroupTask(-self._evaluations, pickle.dumps(data), 1, is_eval=True, greedy=greedy)
                return await self._send(task)

        async with asyncio.TaskGroup() as group:
            guard = group.create_task(self._until_failure())
            running = [group.create_task(one(data)) for data in tasks]
            await asyncio.wait(running)
            guard.cancel()
        results = [each.result() for each in running]
        for result in results:
            self._check_digests(result)
        return results

    def fail(self, error: BaseException) -> None:
        """Whoever waits for groups gets this error."""
        if self._failure is None:
            self._failure = error
            self._changed.set()

    async def aclose(self) -> None:
        self.fail(RuntimeError("the pipeline is closed"))
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _admit(self) -> None:
        for _ in range(self.admission.capacity() if self._failure is None else 0):
            task_id, data = next(self._tasks)
            self.admission.start()
            running = asyncio.ensure_future(self._run(GroupTask(task_id, pickle.dumps(data), self._n_samples)))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, task: GroupTask) -> None:
        try:
            result = await self._send(task)
            self._check_digests(result)
        except Exception as error:
            self.fail(error)
            return
        self._receive(result)
        self._admit()
        self._changed.set()

    async def _send(self, task: GroupTask) -> GroupResult:
        """To the worker with the least to do."""
        index = min(range(len(self._workers)), key=lambda i: self._load[i])
        self._load[index] += task.n_samples
        try:
            return await self._workers[index].run_group(task)
        finally:
            self._load[index] -= task.n_samples

    def _receive(self, result: GroupResult) -> None:
        for rejection in result.rejections:
            self.tally.add(rejection)
        if result.episodes and self._keep is not None and not self._keep(result):
            for _ in result.episodes:
                self.tally.add(Rejection(RejectReason.FILTERED, "dynamic_filter_fn said no"))
            result.episodes.clear()
        if result.episodes and self.admission.is_stale(oldest_version(result)):
            self.admission.reject()
            self._reject_stale(result)
        elif result.episodes:
            self.tally.since_accepted = 0
            self.admission.accept()
            self._ready.append(result)
        else:
            self.admission.reject()
        if self.tally.since_accepted >= self._max_idle_rejections:
            self.fail(NothingAccepted(self._why_nothing()))

    def _expire(self) -> None:
        fresh = []
        for result in self._ready:
            if self.admission.is_stale(oldest_version(result)):
                self.admission.expire()
                self._reject_stale(result)
            else:
                fresh.append(result)
        self._ready = fresh

    def _reject_stale(self, result: GroupResult) -> None:
        for _ in result.episodes:
            self.tally.add(Rejection(RejectReason.STALE, f"older than {self.admission.max_staleness} versions"))

    def _check_digests(self, result: GroupResult) -> None:
        for version, digest in result.digests.items():
            if self._published.get(version, digest) != digest:
                raise WeightMismatch(
                    f"the engine says version {version} has weights {digest}, published were {self._published[version]}"
                )

    def _why_nothing(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.tally.counts.most_common())
        latest = self.tally.latest.detail if self.tally.latest else ""
        return (
            f"the last {self.tally.since_accepted} episodes were all rejected ({reasons}), so nothing can be trained; "
            f"the latest: {latest}"
        )

    async def _until_failure(self) -> None:
        while True:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def oldest_version(result: GroupResult) -> int:
    """The version behind a group's first sampled token."""
    versions = [
        int(row.versions[row.loss_mask].min())
        for episode in result.episodes
        for row in episode.rows
        if row.loss_mask.any()
    ]
    return min(versions)
