"""Rejected episodes, counted by reason; the first of each reason are shown with their traceback."""

# MERGED-DOC
# Finished groups on their way to the trainer: kept while they are fresh, dropped with a reason, taken oldest first.
#
# Owns what is ready, what was rejected and why, and tells admission of each. Knows nothing of workers or waiting.
# The driver's half: tasks go out to workers as admission allows, finished groups come back and are handed over.
#
# Everything happens on one event loop and is driven by events: a group that ends and a version that is published each
# lead to the next admission at once. Nothing polls.
#
# Invariants: a group that is handed over is at most `max_staleness` versions old; groups and evaluations together never
# run more episodes than allowed, and evaluations, which somebody waits for, go first; the first failure is told to
# everybody who waits and starts nothing more.

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from areal.api.errors import NothingAccepted, RejectReason
from areal.api.messages import GroupResult, GroupTask, Rejection
from areal.infra.stalls import StallBook
from areal.rollout.admission import Admission
from areal.rollout.dispatch import Dispatch, GroupWorker, pack_task
from areal.utils import logging

TRACES_SHOWN = 2
"""Rejections logged in full per reason; the rest are only counted."""

logger = logging.getLogger("rollout")


@dataclass
class Rejections:
    counts: Counter[RejectReason] = field(default_factory=Counter)
    idle: Counter[RejectReason] = field(default_factory=Counter)
    """Since an episode was last accepted."""
    latest: Rejection | None = None
    where: str = ""
    """What the log calls these episodes; empty = those of training."""

    def add(self, rejection: Rejection) -> None:
        self.counts[rejection.reason] += 1
        self.idle[rejection.reason] += 1
        self.latest = rejection
        # Age is no fault that a user could find in a log.
        if self.counts[rejection.reason] <= TRACES_SHOWN and rejection.reason is not RejectReason.STALE:
            text = f"{rejection.detail}\n{rejection.trace}".rstrip()
            logger.warning("%srejected (%s): %s", f"{self.where} " if self.where else "", rejection.reason, text)

    def accepted(self) -> None:
        self.idle.clear()

    def why_nothing(self) -> str:
        """The cause in one sentence, for a run that stops because nothing is accepted."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.idle.most_common())
        latest = self.latest.detail if self.latest else "none"
        return (
            f"the last {self.idle.total()} episodes were all rejected ({reasons}), so nothing can be trained; "
            f"the latest: {latest}"
        )


Filter = Callable[[GroupResult], bool]
"""Whether a finished group is to be trained on."""


class ReadyGroups:
    def __init__(self, admission: Admission, keep: Filter | None, max_idle_rejections: int) -> None:
        self.tally = Rejections()
        self._admission = admission
        self._keep = keep
        self._max_idle_rejections = max_idle_rejections
        self._ready: list[GroupResult] = []
        self._rejected_ids: list[int] = []

    def __len__(self) -> int:
        """Groups ready."""
        return len(self._ready)

    def receive(self, result: GroupResult) -> None:
        """Keep a group that has ended, or reject it. Raises NothingAccepted when rejections are all there is."""
        for rejection in result.rejections:
            self.tally.add(rejection)
        why = self._reason_to_reject(result)
        if why is None:
            self.tally.accepted()
            self._admission.accept()
            self._ready.append(result)
        else:
            self._admission.reject()
            self._reject(result, why)
        if self.tally.idle.total() >= self._max_idle_rejections:
            raise NothingAccepted(self.tally.why_nothing())

    def expire(self) -> None:
        """Reject what has become too old."""
        ready, self._ready = self._ready, []
        for result in ready:
            if self._admission.is_stale(result.oldest_version):
                self._admission.expire()
                self._reject(result, self._stale())
            else:
                self._ready.append(result)

    def take(self, count: int) -> list[GroupResult]:
        """The oldest `count`."""
        self._ready.sort(key=attrgetter("oldest_version"))
        batch, self._ready = self._ready[:count], self._ready[count:]
        self._admission.consume(count)
        return batch

    def pop_rejected(self) -> list[int]:
        """Numbers of the tasks rejected since the last call, whatever the reason."""
        ids, self._rejected_ids = self._rejected_ids, []
        return ids

    def _reason_to_reject(self, result: GroupResult) -> Rejection | None:
        if not result.episodes:
            return result.rejections[-1]
        if self._keep is not None and not self._keep(result):
            return Rejection(RejectReason.FILTERED, "dynamic_filter_fn said no")
        return self._stale() if self._admission.is_stale(result.oldest_version) else None

    def _reject(self, result: GroupResult, why: Rejection) -> None:
        """`why` goes for the episodes that were not rejected by themselves."""
        self._rejected_ids.append(result.task_id)
        for _ in result.episodes:
            self.tally.add(why)

    def _stale(self) -> Rejection:
        return Rejection(RejectReason.STALE, f"older than {self._admission.max_staleness} versions")


__all__ = ["Filter", "GroupWorker", "Pipeline", "Rejections", "TaskStream"]


TaskStream = Iterator[tuple[int, dict[str, Any]]]
"""(number, task), endless."""


class Pipeline:
    """Keeps episodes in flight and hands over batches of groups. Made on the event loop that it lives on."""

    def __init__(
        self,
        workers: Sequence[GroupWorker],
        admission: Admission,
        tasks: TaskStream,
        *,
        n_samples: int,
        max_idle_rejections: int,
        keep: Filter | None = None,
        group_seconds: float | None = None,
    ) -> None:
        """`group_seconds` as in `Dispatch`."""
        self.admission = admission
        self.evaluation_tally = Rejections(where="evaluation")
        self._dispatch = Dispatch(workers, group_seconds)
        self._shelf = ReadyGroups(admission, keep, max_idle_rejections)
        self._tasks = tasks
        self._n_samples = n_samples
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._evaluating = 0
        """Evaluation episodes running."""
        self._evaluations_waiting = 0
        """Calls of `evaluate` that have more to start."""
        self._evaluations_named = 0

    def publish(self, version: int, digest: str) -> None:
        """The engine now has these weights; older groups may expire and new ones be admitted."""
        self._dispatch.lineage.publish(version, digest)
        self.admission.version = version
        self._shelf.expire()
        self._admit()

    @property
    def tally(self) -> Rejections:
        """Rejections of training."""
        return self._shelf.tally

    @property
    def stalls(self) -> StallBook:
        return self._dispatch.stalls

    async def take(self, count: int) -> list[GroupResult]:
        """The next `count` groups, oldest first, none staler than allowed."""
        while self._raise_failure() or len(self._shelf) < count:
            await self._change()
        return self._shelf.take(count)

    def pop_rejected(self) -> list[int]:
        """Numbers of the tasks, since the last call, that will never be handed over: rejected, filtered or stale.

        Together with those that were trained they are what a resumed run must not begin again.
        """
        return self._shelf.pop_rejected()

    async def evaluate(self, tasks: Sequence[dict[str, Any]], *, greedy: bool, max_running: int) -> list[GroupResult]:
        """Each task once, in order, beside whatever is being trained on; rejections are part of the results."""
        running: list[asyncio.Task[GroupResult]] = []
        try:
            self._evaluations_waiting += 1
            try:
                for data in tasks:
                    await self._evaluation_room(max_running)
                    running.append(self._start_evaluation(data, greedy))
            finally:
                self._evaluations_waiting -= 1
            return await self._unless_failed(asyncio.gather(*running))
        finally:
            await _end(running)
            self._admit()

    def fail(self, error: BaseException) -> None:
        """Whoever waits for groups gets this error."""
        if not self._failed.done():
            self._failed.set_result(error)
            self._changed.set()

    async def aclose(self) -> None:
        self.fail(RuntimeError("the pipeline is closed"))
        await _end(self._running)

    def _admit(self) -> None:
        """Start what may be started. A task that cannot be had or sent is a failure of the run."""
        unpublished = not self._dispatch.lineage.published
        if unpublished or self._evaluations_waiting or self._failed.done():
            return
        reserved = -(-self._evaluating // self._n_samples)
        try:
            for _ in range(self.admission.capacity(reserved)):
                task_id, data = next(self._tasks)
                self._start(GroupTask(task_id, pack_task(data), self._n_samples))
        except Exception as error:
            self.fail(error)

    def _start(self, task: GroupTask) -> None:
        self.admission.start()
        running = asyncio.ensure_future(self._run(task))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, task: GroupTask) -> None:
        """Nobody waits for this task, so an error is told to those who wait for groups."""
        try:
            self._shelf.receive(await self._dispatch.send(task))
        except Exception as error:
            self.fail(error)
        self._admit()
        self._changed.set()

    def _start_evaluation(self, data: dict[str, Any], greedy: bool) -> asyncio.Task[GroupResult]:
        self._evaluations_named += 1
        task = GroupTask(-self._evaluations_named, pack_task(data), 1, is_eval=True, greedy=greedy)
        running = asyncio.ensure_future(self._evaluate_one(task))
        self._evaluating += 1
        running.add_done_callback(self._end_evaluation)
        return running

    async def _evaluate_one(self, task: GroupTask) -> GroupResult:
        result = await self._dispatch.send(task)
        for rejection in result.rejections:
            self.evaluation_tally.add(rejection)
        return result

    def _end_evaluation(self, ended: asyncio.Task[GroupResult]) -> None:
        self._evaluating -= 1
        self._admit()
        self._changed.set()

    async def _evaluation_room(self, max_running: int) -> None:
        """Wait until one more episode may run."""
        while self._raise_failure() or self._evaluating + self.admission.running * self._n_samples >= max_running:
            await self._change()

    async def _change(self) -> None:
        """Until something may be different. The conditions are looked at again after it."""
        self._changed.clear()
        await self._changed.wait()

    async def _unless_failed(self, work: asyncio.Future[list[GroupResult]]) -> list[GroupResult]:
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may end after we have left
        await asyncio.wait((work, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self._raise_failure()
        return work.result()

    def _raise_failure(self) -> bool:
        """False, or the failure."""
        if self._failed.done():
            raise self._failed.result()
        return False


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
