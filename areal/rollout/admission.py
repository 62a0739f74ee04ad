"""How many groups may be in flight, and which of them a batch must not go without. Pure bookkeeping, no waiting.

A batch of `batch_size` groups is consumed per version. Groups consumed, ready and running together never exceed what
the next `max_staleness + 1` versions can consume, so a group that is consumed in order is at most `max_staleness`
versions old. They end in any order, though, and a batch that goes on with those that have ended can leave more of the
older ones behind than later batches can take in time. Under `when_stale: wait` such a batch has to wait.

Why waiting is always enough. A group of version v can be trained up to version v + η, so of the groups up to version
V - η + k no more than k batches may be left when the batch of version V is taken, for each k from 0 to η. That is all
that is needed: if it holds after one batch, the next one can take those that would be too old afterwards, at most
batch_size, and leave no more than allowed of the others once they have ended.

- For k = η the bound on all groups in flight says it, whatever the batch. For a smaller k, `awaited` does.
- Groups that start later are of version V or newer: they count for k = η only. Those that run again after they were
  lost are as new, and so is a group that has not asked the model for anything yet: its tokens will be of version V or
  newer, however long it has run. A rejected or filtered group counts no more, and the one that replaces it is new.
- Oldest first is the best choice for all k at once, so if even that leaves too many, some of them are still running,
  and to wait for these helps. Groups that run always end; then nothing is left to wait for.
- The last batch takes all that there is, because no more groups are started than the run consumes.

Only groups that a killed run left behind can be too many from the start. They are trained as far as they fit; what
remains is too old then, and rejected.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from areal.config.rollout import WhenStale


@dataclass
class Admission:
    """Counts groups by where they are on their way from start to training."""

    batch_size: int
    max_staleness: int
    max_running: int
    """Groups running at once."""
    total_groups: int
    """Groups that the whole run will consume; more are never started."""
    version: int = 0
    consumed: int = 0
    when_stale: WhenStale = "wait"
    running: int = 0
    _sampling: dict[int, int] = field(default_factory=dict)
    """Those of them that are with a worker, by task: the version than which none of their tokens is older."""
    _ready: Counter[int] = field(default_factory=Counter)
    """Ready groups by their oldest version."""
    _admitting: int = field(init=False)
    """Groups are admitted as of this version: the current one, or the one at which the last wave began."""

    def __post_init__(self) -> None:
        self._admitting = self.version

    @property
    def ready(self) -> int:
        return self._ready.total()

    def capacity(self, reserved: int = 0) -> int:
        """Groups that may be started now, while evaluations take the room of `reserved` running groups."""
        claimed = self.consumed + self.ready + self.running
        by_staleness = (self._admitting + self.max_staleness + 1) * self.batch_size - claimed
        by_concurrency = self.max_running - self.running - reserved
        return max(0, min(by_staleness, by_concurrency, self.total_groups - claimed))

    def publish(self, version: int, wave: int = 1) -> None:
        """New groups are admitted at every `wave`-th version; those that replace others, at any time."""
        self.version = version
        if version - self._admitting >= wave:
            self._admitting = version

    def start(self) -> None:
        self.running += 1

    @contextmanager
    def sampling(self, task_id: int) -> Iterator[None]:
        """A running group is with a worker. If it is lost there, it has no tokens, and comes to another one later."""
        self._sampling[task_id] = self.version
        try:
            yield
        finally:
            del self._sampling[task_id]

    @property
    def aging(self) -> bool:
        """Whether a group that is with a worker counts as older than the weights are."""
        return any(version < self.version for version in self._sampling.values())

    def unasked(self, task_ids: Iterable[int], version: int) -> None:
        """These groups had not asked the model for anything when it had the weights of `version` already."""
        for task_id in task_ids:
            if task_id in self._sampling:
                self._sampling[task_id] = max(version, self._sampling[task_id])

    def accept(self, oldest_version: int) -> None:
        """A running group is ready to be consumed."""
        self.running -= 1
        self._ready[oldest_version] += 1

    def reject(self) -> None:
        """A running group yields nothing."""
        self.running -= 1

    def expire(self, oldest_version: int) -> None:
        """A ready group is too old."""
        self._ready[oldest_version] -= 1

    def consume(self, oldest_versions: Iterable[int]) -> None:
        """A batch of ready groups is trained."""
        for version in oldest_versions:
            self._ready[version] -= 1
            self.consumed += 1

    def is_stale(self, oldest_version: int) -> bool:
        """Whether a group whose oldest token is of `oldest_version` may no longer be trained on."""
        return self.when_stale != "train" and self.version - oldest_version > self.max_staleness

    def awaited(self) -> int:
        """How many old groups run, if a batch now would leave more of them than later ones can take in time; else 0."""
        if self.when_stale != "wait":
            return 0
        sampling_by_version = Counter(self._sampling.values())
        for batches_left in range(self.max_staleness):
            newest = self.version - self.max_staleness + batches_left
            sampling, ready = _up_to(newest, sampling_by_version), _up_to(newest, self._ready)
            left = sampling + max(0, ready - self.batch_size)
            if sampling and left > batches_left * self.batch_size:
                return sampling
        return 0


def _up_to(version: int, counts: Counter[int]) -> int:
    return sum(count for each, count in counts.items() if each <= version)
