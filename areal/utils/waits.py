"""What a part of a run waits for, said where it waits, so that whoever asks why nothing happens can be told.

    with waits.current().entered("waits for the model", 60.0, "proxy.limits.call_timeout_seconds"):
        answer = await engine.agenerate(request)

A part is an episode, the trainer, a process that is being started: each has a `Waits` of its own. `current()` is that
of the part on whose behalf code runs; it follows tasks, and work that is sent to another thread's event loop. A wait is
entered on the path of every model call, so it costs less than a microsecond and writes nothing down. Any thread may
look at any time (`areal/infra/status.py` makes sentences of what it sees).
"""

import time
from collections.abc import Callable
from contextvars import ContextVar

from areal.utils.assigned import Assigned

WAITS_FOR_MODEL = "waits for the model"
"""What an episode does whose model is generating."""

_current: ContextVar["Waits | None"] = ContextVar("areal_waits", default=None)


class Wait:
    """One wait, while its block runs."""

    __slots__ = ("_owner", "limit", "limit_seconds", "since", "until", "what", "where")

    def __init__(
        self,
        owner: "Waits",
        what: str | Callable[[], str],
        limit_seconds: float | None,
        limit: str,
        where: Callable[[], str] | None,
    ) -> None:
        self._owner = owner
        self.what = what
        """What comes after the name of the part: `waits for the model`. A function is called by whoever looks."""
        self.limit_seconds = limit_seconds
        self.limit = limit
        """The setting that says so; empty = none does."""
        self.where = where
        """Gives the line of code that waits, for whoever looks."""
        self.since = 0.0
        self.until: float | None = None
        """When it ends at most; None = it has no deadline of its own."""

    def __enter__(self) -> "Wait":
        self.since = time.monotonic()
        if self.what is WAITS_FOR_MODEL:
            self._owner.asked_model = True
        if self.limit_seconds is not None:
            self.until = self.since + self.limit_seconds
        self._owner.now_waiting[self] = None
        return self

    def put_off(self) -> None:
        """Something has happened: it may take as long again."""
        if self.limit_seconds is not None:
            self.until = time.monotonic() + self.limit_seconds

    def __exit__(self, *exc_info: object) -> None:
        owner = self._owner
        del owner.now_waiting[self]
        owner.left_at = time.monotonic()


class Waits:
    """What one part of a run waits for at the moment."""

    __slots__ = ("asked_model", "left_at", "now_waiting")

    def __init__(self) -> None:
        self.now_waiting: dict[Wait, None] = {}
        """The oldest first."""
        self.left_at = time.monotonic()
        """When the last wait ended: since then, the part has been at work if it waits for nothing."""
        self.asked_model = False
        """Whether it has ever waited for the model. Before, no token was sampled for it."""

    def entered(
        self,
        what: str | Callable[[], str],
        limit_seconds: float | None = None,
        limit: str = "",
        where: Callable[[], str] | None = None,
    ) -> Wait:
        return Wait(self, what, limit_seconds, limit, where)

    def now(self) -> list[Wait]:
        """The oldest first. Safe in any thread: the interpreter copies the keys at one go."""
        return list(self.now_waiting)


def current() -> Waits:
    """Those of the part that this code runs for; where there is none, ones that nobody looks at."""
    return _current.get() or Waits()


def of(waits: Waits) -> Assigned[Waits]:
    """Run a part's code: what it waits for, in this block and in tasks that it starts, is entered there."""
    return Assigned(_current, waits)
