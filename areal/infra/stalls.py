"""Finds code that blocks an event loop while it blocks it, and reports the line, the episode and the remedy.

A thread looks a few times per second at the stack of the loop's own thread; the loop itself does nothing for it. A
callback that is seen again and again is a stall from `seconds` on: it is reported at once, and once more with its
duration when it has ended. Durations are true to within one look. Time spent importing or loading certificates does not
count: it is spent once, by the first call of an SDK or for a new client. Nor does what a busy machine does to a
callback (`Clocks`): time for which its thread could run and others had the processor, or for which nobody could look.

A callback that waits for its own event loop (a synchronous client that calls the proxy of its own process) would wait
for ever: on the main thread, at a limit, `LoopBlocked` is raised inside it.
"""

import asyncio
import linecache
import os
import signal
import ssl
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection
from contextvars import Context
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from areal.api.messages import Stall
from areal.infra import workflow_context
from areal.infra.blocking_calls import remedy_for
from areal.utils.logging import getLogger

LOOKS_PER_STALL = 5
LOGGED_PER_LINE = 3
CLOSE_SECONDS = 5.0
INTERRUPT = signal.SIGUSR2

PACKAGE = Path(__file__).parents[1]
WORKFLOWS = f"{PACKAGE / 'workflow'}{os.sep}"
"""The one part of this package whose code counts as a user's: episodes are written there."""
LIBRARIES = tuple(f"{path}{os.sep}" for path in (PACKAGE, *map(sysconfig.get_path, ("stdlib", "platstdlib"))))
INSTALLED = ("site-packages", "dist-packages")
"""Directories that hold installed packages, whatever environment they belong to."""
CALLBACK = asyncio.Handle._run.__code__
"""Every callback of an event loop runs below this function."""
IMPORTING = "<frozen importlib._bootstrap>"
CERTIFICATES = frozenset(
    function.__code__ for function in (ssl.create_default_context, ssl.SSLContext.load_default_certs)
)
"""What a new HTTP client spends most of its time in, 30 ms of processor time."""

Report = Callable[[Stall], None]

logger = getLogger("rollout")


class LoopBlocked(BaseException):
    """Raised in a callback that blocked its event loop for longer than allowed. Not an `Exception`, on which clients
    would retry."""


class StallWatch:
    """Watches one event loop from a thread of its own."""

    def __init__(
        self,
        seconds: float,
        on_begin: Report,
        on_end: Report,
        *,
        limit_seconds: float | None = None,
        entries: Collection[CodeType] = (),
    ) -> None:
        """`on_begin` and `on_end` are called in the watching thread. `limit_seconds`: when `LoopBlocked` is raised;
        None = never. `entries` are functions of this package that call user code, which may be installed like a
        library."""
        self._seconds = seconds
        self._limit_seconds = limit_seconds
        self._period = seconds / LOOKS_PER_STALL
        self._on_begin, self._on_end = on_begin, on_end
        self._entries = entries
        self._watched = 0
        """The id of the loop's thread."""
        self._read_clocks: Callable[[], Clocks] = lambda: Clocks(time.monotonic())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="areal stall watch", daemon=True)
        self._run: FrameType | None = None
        """The run of a callback that was seen last."""
        self._since = 0.0
        """When it began, moved on by the time that it could not run for."""
        self._stall: Stall | None = None
        self._too_long: FrameType | None = None
        """The run that is to be interrupted."""
        self._handler_before: Any = None

    def start(self) -> None:
        """Watch the event loop of the calling thread."""
        self._watched = threading.get_ident()
        cpu_seconds, starved_seconds = _cpu_clock(self._watched), starvation_clock(threading.get_native_id())
        self._read_clocks = lambda: Clocks(time.monotonic(), cpu_seconds(), starved_seconds())
        if self._limit_seconds is not None and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(INTERRUPT, self._interrupt)
        self._thread.start()

    @property
    def blocked_seconds(self) -> float | None:
        """For how long the callback that is blamed has run by now; None = none is."""
        return None if self._stall is None else time.monotonic() - self._since

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._handler_before is not None and not self._thread.is_alive():  # a late signal must find our handler
            signal.signal(INTERRUPT, self._handler_before)

    def _watch(self) -> None:
        own_starved_seconds = starvation_clock(threading.get_native_id())

        def read() -> Clocks:
            return replace(self._read_clocks(), watch_starved=own_starved_seconds())

        before = read()
        while not self._stop.wait(self._period):
            callback, clocks = running_callback(self._watched), read()
            passed = clocks.since(before)
            lost = passed.lost(self._period)
            self._since += lost
            if passed.kept_lock(self._seconds):
                began = before.now + lost
            else:
                began = clocks.now - min(passed.now, self._period) / 2
            self._look(callback, clocks.now, began=began)
            before = clocks
        self._end(time.monotonic())

    def _look(self, callback: "Callback | None", now: float, *, began: float) -> None:
        """`began` is when a callback that was not there at the last look is assumed to have begun."""
        frame = callback.frame if callback else None
        if frame is not self._run:
            self._end(began)
            self._run, self._since = frame, began
        if callback is None or self._stall is not None:
            self._enforce_limit(now)
        elif callback.is_preparing:
            self._since = now
        elif now - self._since >= self._seconds:
            self._begin(callback, now)

    def _begin(self, callback: "Callback", now: float) -> None:
        place = callback.blame(self._entries)
        if place is None:
            return
        episode = workflow_context.of(callback.context)
        self._stall = Stall(
            where=place.where,
            function=place.function,
            source=place.source,
            remedy=place.remedy,
            workflow=episode.workflow,
            task_id=episode.task_id,
            seconds=now - self._since,
            process=os.getpid(),
        )
        self._on_begin(self._stall)

    def _end(self, when: float) -> None:
        stall, self._stall, self._too_long = self._stall, None, None
        if stall is not None:
            self._on_end(replace(stall, seconds=max(stall.seconds, when - self._since)))

    def _enforce_limit(self, now: float) -> None:
        if self._stall is None or self._handler_before is None or self._limit_seconds is None:
            return
        if self._too_long is None and now - self._since >= self._limit_seconds:
            self._too_long = self._run
            signal.pthread_kill(self._watched, INTERRUPT)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs in the watched thread; by then the callback may have ended after all."""
        callback = callback_of(frame)
        if callback is not None and callback.frame is self._too_long:
            raise LoopBlocked(f"blocked the event loop for longer than {self._limit_seconds:g} s")


@dataclass(frozen=True)
class Clocks:
    """What is known when the watching thread looks, in seconds; or what has passed between two looks."""

    now: float
    used: float = 0.0
    """Of the processor, by the loop's thread."""
    starved: float = 0.0
    """For how long that thread could run and had to wait for a processor."""
    watch_starved: float = 0.0
    """The same of the watching thread."""

    def since(self, before: "Clocks") -> "Clocks":
        return Clocks(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(before), strict=True)))

    def lost(self, period: float) -> float:
        """What of the time between two looks `period` apart is no fault of a callback.

        A look that comes late has seen nothing meanwhile: on a busy machine this thread had no processor, or Python's
        lock was held by a thread that had none. What the loop's thread has computed by then counts in any case.
        """
        late = self.now - period - self.used
        return max(self.starved, late, 0.0)

    def kept_lock(self, seconds: float) -> bool:
        """Whether one call kept Python's lock, and with it this thread from looking, all the time.

        It shows as a look that is late, for no lack of a processor, while the loop's thread computes.
        """
        return self.now - self.watch_starved > seconds and self.used > seconds / 2


def _cpu_clock(thread_id: int) -> Callable[[], float]:
    """The CPU time of another thread of this process, where the system can say it; else always 0."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread_id)
    return lambda: time.clock_gettime(clock)


def starvation_clock(native_thread_id: int) -> Callable[[], float]:
    """For how long a thread could run and had to wait for a processor, where the system can say it; else always 0."""
    path = Path(f"/proc/self/task/{native_thread_id}/schedstat")

    def read() -> float:
        return int(path.read_text().split()[1]) / 1e9

    try:
        read()
    except (OSError, ValueError, IndexError):
        return lambda: 0.0
    return read


@dataclass(frozen=True)
class Callback:
    """A callback that an event loop is running, as seen from another thread.

    Reading a stack costs the thread that is read nothing. It may move on meanwhile: this was true a moment ago.
    """

    frame: FrameType
    """Of the call that runs it; another run of the same callback has another."""
    stack: list[FrameType]
    """The frames below that, outermost first."""

    @property
    def is_importing(self) -> bool:
        return any(frame.f_code.co_filename == IMPORTING for frame in self.stack)

    @property
    def is_preparing(self) -> bool:
        """Whether it does what is done once: for a library, or for a client."""
        return self.is_importing or any(frame.f_code in CERTIFICATES for frame in self.stack)

    @property
    def context(self) -> Context:
        """The variables it runs under, an episode's among them; none if it has just ended."""
        handle = self.frame.f_locals.get("self")  # asyncio clears it in the end
        return Context() if handle is None else handle._context

    def blame(self, entries: Collection[CodeType]) -> "Place | None":
        """The innermost line of user code; None if there is none. `entries` as in `StallWatch`."""
        users = [index for index, frame in enumerate(self.stack) if is_user_code(frame.f_code.co_filename)]
        below_entries = [index + 1 for index, frame in enumerate(self.stack[:-1]) if frame.f_code in entries]
        blamed = max(users or below_entries, default=None)
        if blamed is None:
            return None
        frame, code = self.stack[blamed], self.stack[blamed].f_code
        source = linecache.getline(code.co_filename, frame.f_lineno).strip()
        called = [str(each.f_globals.get("__name__")) for each in self.stack[blamed + 1 :]]
        where = f"{short_file(code.co_filename)}:{frame.f_lineno}"
        return Place(where, code.co_name, source, remedy_for(source, called))


@dataclass(frozen=True)
class Place:
    """A line of code that holds an event loop."""

    where: str
    """`file:line`"""
    function: str
    source: str
    """The line's text; empty if it cannot be read."""
    remedy: str


def running_callback(thread_id: int) -> Callback | None:
    """The callback that a thread's event loop is running; None while it waits for something to do."""
    return callback_of(sys._current_frames().get(thread_id))


def callback_of(frame: FrameType | None) -> Callback | None:
    """The callback whose innermost frame this is."""
    stack: list[FrameType] = []
    found: Callback | None = None
    while frame is not None:
        if frame.f_code is CALLBACK:
            found = Callback(frame, stack[::-1])
        stack.append(frame)
        frame = frame.f_back
    return found


def is_user_code(file: str) -> bool:
    if file.startswith(WORKFLOWS):
        return True
    return not file.startswith((*LIBRARIES, "<frozen ")) and not any(
        f"{os.sep}{name}{os.sep}" in file for name in INSTALLED
    )


def short_file(file: str) -> str:
    """Relative to the directory that the program was started in, if it is below that."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


class StallLog:
    """Stalls by the line that caused them: the first few of each line are logged, all are counted for a summary."""

    def __init__(self) -> None:
        self._totals: dict[str, _LineTotal] = {}

    def begin(self, stall: Stall) -> None:
        if self._is_news(stall):
            logger.warning("%s", describe_ongoing(stall))

    def end(self, stall: Stall, *, logged: bool = False) -> None:
        """`logged`: this process's log has it already."""
        if not logged and self._is_news(stall):
            logger.warning("%s", describe_ended(stall))
        total = self._totals.setdefault(stall.where, _LineTotal())
        total.times += 1
        total.seconds += stall.seconds
        total.remedy = stall.remedy

    def summary(self) -> list[str]:
        """A sentence for each line, the worst first."""
        worst = sorted(self._totals.items(), key=lambda item: -item[1].seconds)
        return [
            f"{where} blocked the event loop {'once' if total.times == 1 else f'{total.times} times'}, "
            f"{total.seconds:.1f} s in all; use {total.remedy}"
            for where, total in worst
        ]

    def _is_news(self, stall: Stall) -> bool:
        return stall.where not in self._totals or self._totals[stall.where].times < LOGGED_PER_LINE


@dataclass
class _LineTotal:
    times: int = 0
    seconds: float = 0.0
    remedy: str = ""


def describe_ongoing(stall: Stall) -> str:
    return (
        f"{_episode(stall)} has been blocking the event loop for {stall.seconds:.1f} s {_place(stall)}; all other "
        f"episodes of this worker wait; use {stall.remedy}"
    )


def describe_ended(stall: Stall) -> str:
    return f"{_episode(stall)} blocked the event loop for {stall.seconds:.1f} s {_place(stall)}; use {stall.remedy}"


def _episode(stall: Stall) -> str:
    task = "" if stall.task_id is None else f" (task {stall.task_id})"
    return f"{stall.workflow or 'code outside an episode'}{task}"


def _place(stall: Stall) -> str:
    text = f": {stall.source}" if stall.source else ""
    return f"at {stall.where} in {stall.function}{text}"
