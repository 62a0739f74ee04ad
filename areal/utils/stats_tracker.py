"""Numbers that code records about itself: `stats_tracker.get("rollout").scalar(reward=1.0)`.

Inside `collect()` they go to that collection (one per episode). Elsewhere they are dropped, since no one reads them.

Every name becomes a curve, so their number and length are bounded. A value beyond that is dropped and counted, under
the name `stats_dropped`. It is no error, because a name may come from what a model wrote, and that must not decide
which episodes are trained on.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field

from areal.utils.assigned import Assigned

MAX_NAMES = 64
"""Of one collection."""
MAX_NAME_CHARACTERS = 128
"""Of a name with its scope; all must be printable."""
DROPPED = "stats_dropped"
"""The number of values that a collection did not take."""

_current: ContextVar["Collection | None"] = ContextVar("areal_stats", default=None)


@dataclass
class Collection:
    """What was recorded during one `collect()`."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def record(self, name: str, value: float) -> None:
        value = float(value)
        if name == DROPPED:  # of a collection in another process
            self._drop(value)
        elif name in self.values or (len(self.values.keys() - {DROPPED}) < MAX_NAMES and _is_short(name)):
            self.values.setdefault(name, []).append(value)
        else:
            self._drop(1.0)

    def means(self) -> dict[str, float]:
        return {key: sum(values) / len(values) for key, values in self.values.items()}

    def _drop(self, count: float) -> None:
        (before,) = self.values.get(DROPPED, (0.0,))
        self.values[DROPPED] = [before + count]


def _is_short(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()


class Tracker:
    """Records under one scope's name."""

    def __init__(self, scope: str) -> None:
        self.scope = scope

    def scalar(self, **values: float) -> None:
        collection = _current.get()
        if collection is not None:
            for name, value in values.items():
                collection.record(f"{self.scope}/{name}" if self.scope else name, value)


def get(scope: str = "") -> Tracker:
    return Tracker(scope)


def scalar(**values: float) -> None:
    Tracker("").scalar(**values)


def collect() -> Assigned[Collection]:
    """Gather what is recorded in this block and in the tasks it starts."""
    return Assigned(_current, Collection())
