"""Numbers that code records about itself: `stats_tracker.get("rollout").scalar(reward=1.0)`.

Inside `collect()` they go to that collection (one per episode). Elsewhere they are dropped, since no one reads them.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_current: ContextVar["Collection | None"] = ContextVar("areal_stats", default=None)


@dataclass
class Collection:
    """What was recorded during one `collect()`."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def means(self) -> dict[str, float]:
        return {key: sum(values) / len(values) for key, values in self.values.items()}


class Tracker:
    """Records under one scope's name."""

    def __init__(self, scope: str) -> None:
        self.scope = scope

    def scalar(self, **values: float) -> None:
        collection = _current.get()
        if collection is not None:
            for name, value in values.items():
                collection.values[f"{self.scope}/{name}" if self.scope else name].append(float(value))


def get(scope: str = "") -> Tracker:
    return Tracker(scope)


def scalar(**values: float) -> None:
    Tracker("").scalar(**values)


@contextmanager
def collect() -> Iterator[Collection]:
    """Gather what is recorded in this block and in the tasks it starts."""
    collection = Collection()
    token = _current.set(collection)
    try:
        yield collection
    finally:
        _current.reset(token)
