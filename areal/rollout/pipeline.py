"""The driver's half of rollout: tasks go out to workers as admission allows, finished groups come back for training.

`Pipeline` starts groups and waits for them; `ReadyGroups` keeps the finished ones while they are fresh and drops the
others with a reason; `Rejections` counts those reasons. All of it happens on one event loop and is driven by events: a
group that ends and a version that is published each lead to the next admission at once. Nothing polls.

Invariants: a group that is handed over is at most `max_staleness` versions old, unless `when_stale` is `train`; under
`wait` none is dropped for its age (admission.py says why that can be); groups and evaluations together never run more
episodes than allowed, and evaluations, which hold up their caller, go first; after the first failure nothing more is
started and every waiting call raises it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Protocol

from areal.api.errors import NothingAccepted, RejectReason
from areal.api.messages import Doing, GroupResult, GroupTask, Rejection
from areal.infra.stalls import StallLog
from areal.infra.status import of_wait
from areal.rollout.admission import Admission
from areal.rollout.dispatch import Dispatch, GroupWorker, pack_task
from areal.rollout.waves import Waves
from areal.utils import waits
from areal.utils.logging import getLogger
from areal.utils.shorten import plural

LOGGED_PER_REASON = 2
"""Rejections logged in full per reason; the rest are only counted."""
NO_FAULTS = (RejectReason.STALE, RejectReason.FILTERED)
"""Reasons that are no mistake in anybody's code: a strict filter may reject many in a row."""
PATIENCE = 8
"""How many times `max_idle_rejections` may be rejected in a row where that is no reason to give up at once."""

TaskStream = Iterator[tuple[int, dict[str, Any]]]
"""(number, task), endless."""

Filter = Callable[[GroupResult], bool]
"""Whether a finished group is to be trained on."""

logger = getLogger("rollout")


class GroupRecord(Protocol):
    """Writes down what becomes of each group. Nothing here waits."""

    def started(self, task_id: int, version: int, task: Mapping[str, Any]) -> None: ...

    def ready(self, result: GroupResult) -> None:
        """It has ended, and waits to be trained."""
        ...

    def rejected(self, result: GroupResult, why: Rejection) -> None:
        """It will not be trained: it has just ended, or it was ready."""
        ...


class NoRecord:
    """For those who write nothing down."""

    def started(self, task_id: int, version: int, task: Mapping[str, Any]) -> None:
        return

    def ready(self, result: GroupResult) -> None:
        return

    def rejected(self, result: GroupResult, why: Rejection) -> None:
        return


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
        record: GroupRecord | None = None,
        ready: Sequence[GroupResult] = (),
    ) -> None:
        """`group_seconds` as in `Dispatch`; `ready`: groups that ended in an earlier session of the run."""
        self.admission = admission
        self.evaluation_rejections = Rejections("evaluation ")
        self._max_idle_rejections = max_idle_rejections
        self.expiring_wait_seconds = 0.0
        """Of the latest `take`: how long it waited, with enough groups ready, for others that were about to expire."""
        self._dispatch = Dispatch(workers, group_seconds)
        self._record = record or NoRecord()
        self._ready = ReadyGroups(admission, keep, max_idle_rejections, self._record)
        self._ready.restore(ready)
        self._waves = Waves(admission.batch_size, admission.max_staleness, admission.max_running)
        self._tasks = tasks
        self._n_samples = n_samples
        self._running: set[asyncio.Task[None]] = set()
        self._aging_since: dict[int, float] = {}
        """When each running group, by its task, was last known to have no token."""
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._taken_at: float | None = None
        """When the batch was taken that the next version comes from."""
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._evaluating = 0
        """Evaluation episodes running."""
        self._evaluations_waiting = 0
        """Calls of `evaluate` that have more to start."""

    @property
    def rejections(self) -> "Rejections":
        """Those of training."""
        return self._ready.rejections

    @property
    def sampled_tokens(self) -> int:
        """Of all episodes that ended and were not rejected for themselves, trained on or not."""
        return self._ready.sampled_tokens

    @property
    def evaluating(self) -> int:
        """Evaluation episodes running."""
        return self._evaluating

    @property
    def stalls(self) -> StallLog:
        """What blocked the workers' event loops."""
        return self._dispatch.stalls

    def publish(self, version: int, digest: str) -> None:
        """The engine now has these weights; older groups may expire and new ones be admitted."""
        self._dispatch.weights.publish(version, digest)
        if self._taken_at is not None:
            self._waves.trained(self._clock() - self._taken_at)
            self._taken_at = None
        waits = self.admission.when_stale == "wait"
        self.admission.publish(version, self._waves.batches() if waits else 1)
        self._ready.expire()
        self._admit()
        if waits and self.admission.aging:
            self._in_background(self._find_unasked(version))

    async def take(self, count: int) -> list[GroupResult]:
        """The next `count` groups, oldest first, none staler than allowed."""
        with waits.current().entered(lambda: f"waits for {count - len(self._ready)} of {count} groups"):
            await self._until(lambda: len(self._ready) >= count)
        enough_at = self._clock()
        with waits.current().entered(
            lambda: f"waits for groups that are about to become too old: {self.admission.awaited()} of them still run"
        ):
            await self._until(lambda: len(self._ready) >= count and not self.admission.awaited())
        self._taken_at = self._clock()
        self.expiring_wait_seconds = self._taken_at - enough_at
        return self._ready.take(count)

    def pop_rejected(self) -> list[int]:
        """Numbers of the tasks, since the last call, that will never be handed over: rejected, filtered or stale.

        Together with the trained ones they are those that a resumed run must not begin again.
        """
        return self._ready.pop_rejected()

    def pop_dropped(self) -> "Tally":
        """The groups, since the last call, that had been sampled and were too old to be trained."""
        return self._ready.pop_dropped()

    async def evaluate(
        self,
        tasks: Sequence[dict[str, Any]],
        *,
        greedy: bool,
        max_running: int,
        on_result: Callable[[GroupResult], None] = lambda result: None,
    ) -> list[GroupResult]:
        """Each task once, in order, while training goes on; rejections are part of the results.

        A task's number follows from its place, so that what it samples does too: the same again for the same weights.
        `on_result` gets each result when it comes.
        """
        running: list[asyncio.Task[GroupResult]] = []

        def describe() -> str:
            done = sum(each.done() for each in running)
            return f"waits for an evaluation of {plural(len(tasks), 'task')}: {done} done"

        with waits.current().entered(describe):
            return await self._evaluate(tasks, running, on_result, greedy=greedy, max_running=max_running)

    async def _evaluate(
        self,
        tasks: Sequence[dict[str, Any]],
        running: list[asyncio.Task[GroupResult]],
        on_result: Callable[[GroupResult], None],
        *,
        greedy: bool,
        max_running: int,
    ) -> list[GroupResult]:
        """`running` is filled."""
        try:
            self._evaluations_waiting += 1
            try:
                for place, data in enumerate(tasks, 1):
                    await self._until(lambda: self._evaluating + self.admission.running * self._n_samples < max_running)
                    # Negative, so that it is the number of no training task.
                    task = GroupTask(-place, pack_task(data), 1, is_eval=True, greedy=greedy)
                    running.append(self._start_evaluation(task, on_result))
            finally:
                self._evaluations_waiting -= 1
            return await self._unless_failed(asyncio.gather(*running))
        finally:
            await _end(running)
            self._admit()

    def doing(self) -> Doing:
        """Where the groups are, and why no more are started."""
        admission, sent = self.admission, self._dispatch.sent.now()
        what = f"has {plural(admission.running, 'group')} running and {admission.ready} ready to be trained"
        if why := self._why_none_starts():
            what += f"; no more start {why}"
        if not sent:
            return Doing("the pipeline", what)
        return replace(of_wait("the pipeline", sent[0]), what=f"{what}; the oldest, of {sent[0].what}, runs")

    def _why_none_starts(self) -> str:
        """Empty = they do, or as many run as may."""
        admission = self.admission
        if not self._dispatch.weights.published:
            return "before the first weights are published"
        if self._evaluations_waiting:
            return "before an evaluation has what it needs"
        if admission.capacity() or admission.running >= admission.max_running:
            return ""
        if admission.consumed + admission.ready + admission.running >= admission.total_groups:
            return "because the last steps have theirs"
        return f"before version {admission.version + 1} (rollout.max_head_offpolicyness={admission.max_staleness})"

    def fail(self, error: BaseException) -> None:
        """Calls that wait for groups raise this error."""
        if not self._failed.done():
            self._failed.set_result(error)
            self._changed.set()

    async def aclose(self) -> None:
        self.fail(RuntimeError("the pipeline is closed"))
        await _end(self._running)

    def _admit(self) -> None:
        """Start what may be started. A task that cannot be read or sent is a failure of the run."""
        if not self._dispatch.weights.published or self._evaluations_waiting or self._failed.done():
            return
        reserved = -(-self._evaluating // self._n_samples)
        try:
            for _ in range(self.admission.capacity(reserved)):
                task_id, data = next(self._tasks)
                self._record.started(task_id, self.admission.version, data)
                self._start(GroupTask(task_id, pack_task(data), self._n_samples))
        except Exception as error:
            self.fail(error)

    def _start(self, task: GroupTask) -> None:
        self.admission.start()
        self._aging_since[task.task_id] = self._clock()
        self._in_background(self._run(task))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        running = asyncio.ensure_future(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, task: GroupTask) -> None:
        """Runs in the background, so its error goes to the calls that wait for groups."""
        try:
            started_at = self._clock()
            result = await self._dispatch.send(task, partial(self.admission.sampling, task.task_id))
            ended_at = self._clock()
            self._waves.ended(ended_at - started_at, ended_at - self._aging_since[task.task_id])
            self._ready.receive(result)
        except Exception as error:
            self.fail(error)
        finally:
            del self._aging_since[task.task_id]
        self._admit()
        self._changed.set()

    async def _find_unasked(self, version: int) -> None:
        """Groups that have asked the model for nothing, while it has the weights of `version`, are as new as these."""
        try:
            task_ids = await self._dispatch.unasked_groups()
        except Exception as error:
            self.fail(error)
            return
        self.admission.unasked(task_ids, version)
        now = self._clock()
        self._aging_since |= {task_id: now for task_id in task_ids if task_id in self._aging_since}
        self._changed.set()

    def _start_evaluation(self, task: GroupTask, on_result: Callable[[GroupResult], None]) -> asyncio.Task[GroupResult]:
        running = asyncio.ensure_future(self._evaluate_one(task, on_result))
        self._evaluating += 1
        running.add_done_callback(self._end_evaluation)
        return running

    async def _evaluate_one(self, task: GroupTask, on_result: Callable[[GroupResult], None]) -> GroupResult:
        result = await self._dispatch.send(task)
        rejections = self.evaluation_rejections
        for rejection in result.rejections:
            rejections.add(rejection)
        if result.episodes:
            rejections.accept()
        elif rejections.all_alike and rejections.idle.total() >= self._max_idle_rejections:
            error = NothingAccepted(rejections.why_nothing_is_accepted())
            self.fail(error)
            raise error
        on_result(result)
        return result

    def _end_evaluation(self, ended: asyncio.Task[GroupResult]) -> None:
        self._evaluating -= 1
        self._admit()
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()`, which is looked at after every change; raises the run's failure."""
        self._raise_failure()
        while not condition():
            self._changed.clear()
            await self._changed.wait()
            self._raise_failure()

    async def _unless_failed(self, work: asyncio.Future[list[GroupResult]]) -> list[GroupResult]:
        """What `work` gives; raises the run's failure if that comes first."""
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may end after we have left
        await asyncio.wait((work, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self._raise_failure()
        return work.result()

    def _raise_failure(self) -> None:
        if self._failed.done():
            raise self._failed.result()


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ReadyGroups:
    """Finished groups on their way to the trainer; reports to admission what becomes of each. Never waits."""

    def __init__(
        self, admission: Admission, keep: Filter | None, max_idle_rejections: int, record: GroupRecord
    ) -> None:
        self.rejections = Rejections()
        self._record = record
        self._admission = admission
        self._keep = keep
        self._max_idle_rejections = max_idle_rejections
        self.sampled_tokens = 0
        self._groups: list[GroupResult] = []
        self._rejected_ids: list[int] = []
        self._dropped = Tally()

    def __len__(self) -> int:
        return len(self._groups)

    def restore(self, groups: Sequence[GroupResult]) -> None:
        """They were ready when the run ended; the first version that is published shows which are too old by now."""
        for result in groups:
            self._admission.start()
            self._admission.accept(result.oldest_version)
            self._groups.append(result)

    def receive(self, result: GroupResult) -> None:
        """Keep a group that has ended, or reject it. Raises NothingAccepted when rejections are all there is."""
        self.sampled_tokens += sum(episode.trained_tokens for episode in result.episodes)
        for rejection in result.rejections:
            self.rejections.add(rejection)
        why = self._reason_to_reject(result)
        if why is None:
            self.rejections.accept()
            self._admission.accept(result.oldest_version)
            self._record.ready(result)
            self._groups.append(result)
        else:
            self._admission.reject()
            self._reject(result, why)
        patience = self._max_idle_rejections * (1 if self.rejections.all_alike else PATIENCE)
        if self.rejections.idle.total() >= patience:
            raise NothingAccepted(self.rejections.why_nothing_is_accepted())

    def expire(self) -> None:
        """Reject the groups that have become too old."""
        groups, self._groups = self._groups, []
        for result in groups:
            if self._admission.is_stale(result.oldest_version):
                self._admission.expire(result.oldest_version)
                self._reject(result, self._stale())
            else:
                self._groups.append(result)

    def take(self, count: int) -> list[GroupResult]:
        """The oldest `count`; those of one age in the order of their tasks, not in that of their arrival."""
        self._groups.sort(key=lambda result: (result.oldest_version, result.task_id))
        batch, self._groups = self._groups[:count], self._groups[count:]
        self._admission.consume(result.oldest_version for result in batch)
        return batch

    def pop_rejected(self) -> list[int]:
        """Numbers of the tasks rejected since the last call, whatever the reason."""
        ids, self._rejected_ids = self._rejected_ids, []
        return ids

    def pop_dropped(self) -> "Tally":
        """Groups dropped for their age since the last call."""
        dropped, self._dropped = self._dropped, Tally()
        return dropped

    def _reason_to_reject(self, result: GroupResult) -> Rejection | None:
        if not result.episodes:
            return result.rejections[-1]
        if self._keep is not None and not self._keep(result):
            return Rejection(RejectReason.FILTERED, "dynamic_filter_fn said no")
        return self._stale() if self._admission.is_stale(result.oldest_version) else None

    def _reject(self, result: GroupResult, why: Rejection) -> None:
        """`why` goes for the episodes that were not rejected by themselves."""
        self._record.rejected(result, why)
        self._rejected_ids.append(result.task_id)
        if why.reason is RejectReason.STALE:
            self._dropped += Tally.of([result])
        for _ in result.episodes:
            self.rejections.add(why)

    def _stale(self) -> Rejection:
        return Rejection(RejectReason.STALE, f"older than {self._admission.max_staleness} versions")


@dataclass(frozen=True)
class Tally:
    """Groups, and sums over their episodes."""

    groups: int = 0
    episodes: int = 0
    tokens: int = 0
    """Sampled, and trained if the group is."""
    seconds: float = 0.0
    reward: float = 0.0

    @classmethod
    def of(cls, groups: Sequence[GroupResult]) -> "Tally":
        episodes = [episode for group in groups for episode in group.episodes]
        return cls(
            len(groups),
            len(episodes),
            sum(episode.trained_tokens for episode in episodes),
            sum(episode.seconds for episode in episodes),
            sum(episode.reward for episode in episodes),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """Of an episode; empty if there is none."""
        if not self.episodes:
            return {}
        return {name: getattr(self, name) / self.episodes for name in ("tokens", "seconds", "reward")}


class Rejections:
    """Rejected episodes, counted by reason; the first of each reason are logged with their traceback."""

    def __init__(self, label: str = "") -> None:
        """`label` begins the log lines."""
        self.counts: Counter[RejectReason] = Counter()
        self.idle: Counter[RejectReason] = Counter()
        """Since an episode was last accepted."""
        self._kinds: set[tuple[RejectReason, str]] = set()
        """Of all rejections so far: the reason, and the line that raised if one did."""
        self._accepted = False
        self._label = label
        self._latest: Rejection | None = None

    @property
    def all_alike(self) -> bool:
        """Whether nothing was ever accepted, and all that was rejected failed in one way."""
        return (
            not self._accepted and len(self._kinds) == 1 and all(reason not in NO_FAULTS for reason, _ in self._kinds)
        )

    def accept(self) -> None:
        """An episode was accepted."""
        self._accepted = True
        self.idle.clear()

    def add(self, rejection: Rejection) -> None:
        self.counts[rejection.reason] += 1
        self.idle[rejection.reason] += 1
        self._kinds.add((rejection.reason, _raising_line(rejection.trace)))
        self._latest = rejection
        # A stale episode is not a fault that a user could look for in a log.
        if self.counts[rejection.reason] <= LOGGED_PER_REASON and rejection.reason is not RejectReason.STALE:
            text = f"{rejection.detail}\n{rejection.trace}".rstrip()
            logger.warning("%srejected (%s): %s", self._label, rejection.reason, text)

    def why_nothing_is_accepted(self) -> str:
        """A sentence, and the traceback of the latest rejection."""
        assert self._latest is not None
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.idle.most_common())
        which = (
            f"first {self.idle.total()} {self._label}episodes all failed alike"
            if self.all_alike
            else (f"last {self.idle.total()} {self._label}episodes were all rejected")
        )
        sentence = (
            f"the {which} ({reasons}), so nothing can be trained; the latest: {self._latest.detail}; mend that, or "
            "allow more by rollout.max_idle_rejections"
        )
        return f"{sentence}\n{self._latest.trace}".rstrip()


def _raising_line(trace: str) -> str:
    """The innermost `File "…", line N` of a traceback; empty if there is none."""
    places = [line.strip() for line in trace.splitlines() if line.lstrip().startswith('File "')]
    return places[-1] if places else ""
