"""How many groups may be in flight: bounded by staleness and by concurrency. Pure bookkeeping, no waiting.

A batch of `batch_size` groups is consumed per version. Groups consumed, ready and running together never exceed what
the next `max_staleness + 1` versions can consume, so a group that is consumed in order is at most `max_staleness`
versions old. What is consumed out of order is checked again, by age, when it is taken.
"""

from dataclasses import dataclass


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
    ready: int = 0
    running: int = 0

    def capacity(self, reserved: int = 0) -> int:
        """Groups that may be started now, while evaluations take the room of `reserved` running groups."""
        claimed = self.consumed + self.ready + self.running
        by_staleness = (self.version + self.max_staleness + 1) * self.batch_size - claimed
        by_concurrency = self.max_running - self.running - reserved
        return max(0, min(by_staleness, by_concurrency, self.total_groups - claimed))

    def start(self) -> None:
        self.running += 1

    def accept(self) -> None:
        """A running group is ready to be consumed."""
        self.running -= 1
        self.ready += 1

    def reject(self) -> None:
        """A running group yields nothing."""
        self.running -= 1

    def expire(self) -> None:
        """A ready group is too old."""
        self.ready -= 1

    def consume(self, count: int) -> None:
        self.ready -= count
        self.consumed += count

    def is_stale(self, oldest_version: int) -> bool:
        """Whether a group whose oldest token is of `oldest_version` may no longer be trained on."""
        return self.version - oldest_version > self.max_staleness
