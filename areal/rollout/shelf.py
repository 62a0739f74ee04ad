"""Finished groups on their way to the trainer: kept while they are fresh, dropped with a reason, taken oldest first.

Owns what is ready, what was rejected and why, and tells admission of each. Knows nothing of workers or waiting.
"""

from collections.abc import Callable

from areal.api.errors import NothingAccepted
from areal.api.messages import GroupResult, Rejection
from areal.api.rejection import RejectReason
from areal.rollout.admission import Admission
from areal.rollout.tally import Tally

Filter = Callable[[GroupResult], bool]
"""Whether a finished group is to be trained on."""


class Shelf:
    def __init__(self, admission: Admission, keep: Filter | None, max_idle_rejections: int) -> None:
        self.tally = Tally()
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
            if self._admission.is_stale(oldest_version(result)):
                self._admission.expire()
                self._reject(result, self._stale())
            else:
                self._ready.append(result)

    def take(self, count: int) -> list[GroupResult]:
        """The oldest `count`."""
        self._ready.sort(key=oldest_version)
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
        return self._stale() if self._admission.is_stale(oldest_version(result)) else None

    def _reject(self, result: GroupResult, why: Rejection) -> None:
        """`why` goes for the episodes that were not rejected by themselves."""
        self._rejected_ids.append(result.task_id)
        for _ in result.episodes:
            self.tally.add(why)

    def _stale(self) -> Rejection:
        return Rejection(RejectReason.STALE, f"older than {self._admission.max_staleness} versions")


def oldest_version(result: GroupResult) -> int:
    """The version behind a group's first sampled token."""
    trained = (row.versions[row.loss_mask] for episode in result.episodes for row in episode.rows)
    return min(int(versions.min()) for versions in trained if len(versions))
