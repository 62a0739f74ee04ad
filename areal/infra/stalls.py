"""What an event loop's thread is doing right now, read from outside: which callback, whose line, for which episode.

Reading a stack costs the thread that is read nothing. It may move on meanwhile: what is told was true a moment ago.
"""

# MERGED-DOC
# Stalls, counted by the line that caused them: the first of each line are told, the rest only counted.
# Finds code that holds an event loop, while it does: a thread looks at the loop's own a few times per second.
#
# The loop itself does nothing for it. A callback that is seen again and again without an end is a stall from `seconds`
# on: it is told at once, and once more with its duration when it is over. Durations are true to within one look. Time
# spent importing does not count: that happens once, and an SDK's first call does it.
#
# A callback that waits for its own event loop (a synchronous client that asks the proxy of its own process) would wait
# for ever: on the main thread, at a limit, `LoopBlocked` is raised inside of it.

import asyncio
import linecache
import os
import signal
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextvars import Context
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from areal.api.messages import Stall
from areal.infra import workflow_context
from areal.infra.blocking_calls import remedy_for

PACKAGE = Path(__file__).parents[1]
WORKFLOWS = f"{PACKAGE / 'workflow'}{os.sep}"
"""The one room of this package whose code is a user's: episodes are written there."""
LIBRARIES = tuple(f"{path}{os.sep}" for path in (PACKAGE, *map(sysconfig.get_path, ("stdlib", "platstdlib"))))
INSTALLED = ("site-packages", "dist-packages")
"""Directories that hold installed packages, whatever environment they belong to."""
CALLBACK = asyncio.Handle._run.__code__
"""Every callback of an event loop runs below this function."""
IMPORTING = "<frozen importlib._bootstrap>"


@dataclass(frozen=True)
class Place:
    """A line that holds an event loop."""

    where: str
    """`file:line`"""
    function: str
    source: str
    """The line's text; empty if it cannot be had."""
    remedy: str


@dataclass(frozen=True)
class Callback:
    """A callback that an event loop is running."""

    frame: FrameType
    """Of the call that runs it; another run of the same callback has another."""
    stack: list[FrameType]
    """Below that, outermost first."""

    @property
    def context(self) -> Context:
        """The variables it runs under, an episode's among them."""
        context: Context = self.frame.f_locals["self"]._context
        return context

    @property
    def is_importing(self) -> bool:
        return any(frame.f_code.co_filename == IMPORTING for frame in self.stack)

    def blame(self, entries: Collection[CodeType]) -> Place | None:
        """The innermost line of user code; None if there is none.

        `entries` are functions of ours that call user code, which may be installed where libraries are.
        """
        files = [frame.f_code.co_filename for frame in self.stack]
        own = [index for index, file in enumerate(files) if is_user_code(file)]
        below_entry = [index + 1 for index, frame in enumerate(self.stack[:-1]) if frame.f_code in entries]
        chosen = max(own or below_entry, default=None)
        return None if chosen is None else _place(self.stack[chosen], self.stack[chosen + 1 :])


def running_callback(thread_id: int) -> Callback | None:
    """The callback that a thread's event loop is in; None while it waits for something to do."""
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


def _place(frame: FrameType, below: list[FrameType]) -> Place:
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    modules = [str(each.f_globals.get("__name__")) for each in below]
    where = f"{short_file(code.co_filename)}:{frame.f_lineno}"
    return Place(where, code.co_name, source, remedy_for(source, modules))


def short_file(file: str) -> str:
    """As seen from where the program was started, if it is below."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


TOLD = 3
"""Stalls of one line that are told one by one."""


@dataclass
class Blocked:
    times: int = 0
    seconds: float = 0.0
    remedy: str = ""


@dataclass
class StallBook:
    lines: dict[str, Blocked] = field(default_factory=lambda: defaultdict(Blocked))
    """By `file:line`."""

    def is_news(self, stall: Stall) -> bool:
        """Whether it is one of the first of its line, before it is added."""
        return stall.where not in self.lines or self.lines[stall.where].times < TOLD

    def add(self, stall: Stall) -> None:
        line = self.lines[stall.where]
        line.times += 1
        line.seconds += stall.seconds
        line.remedy = stall.remedy

    def summary(self) -> list[str]:
        """A sentence for each line, the worst first."""
        worst = sorted(self.lines.items(), key=lambda item: -item[1].seconds)
        return [
            f"{where} blocked the event loop {times(line.times)}, {line.seconds:.1f} s in all; use {line.remedy}"
            for where, line in worst
        ]


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def so_far(stall: Stall) -> str:
    """What is said while it lasts."""
    return (
        f"{episode(stall)} has been blocking the event loop for {stall.seconds:.1f} s {place(stall)}; all other "
        f"episodes of this worker wait; use {stall.remedy}"
    )


def over(stall: Stall) -> str:
    """What is said when it has ended."""
    return f"{episode(stall)} blocked the event loop for {stall.seconds:.1f} s {place(stall)}; use {stall.remedy}"


def episode(stall: Stall) -> str:
    task = "" if stall.task_id is None else f" (task {stall.task_id})"
    return f"{stall.workflow or 'code outside an episode'}{task}"


def place(stall: Stall) -> str:
    text = f": {stall.source}" if stall.source else ""
    return f"at {stall.where} in {stall.function}{text}"


LOOKS_PER_STALL = 5
CLOSE_SECONDS = 5.0

INTERRUPT = signal.SIGUSR2

Tell = Callable[[Stall], None]


class LoopBlocked(BaseException):
    """Raised where a callback blocked its event loop for longer than it may. No `Exception`: clients retry on those."""


class StallWatch:
    def __init__(
        self,
        seconds: float,
        began: Tell,
        ended: Tell,
        *,
        limit_seconds: float | None = None,
        entries: Collection[CodeType] = (),
    ) -> None:
        """`began` and `ended` are called in the watching thread; `entries` as in `Callback.blame`.

        `limit_seconds`: when `LoopBlocked` is raised; None = never.
        """
        self._seconds = seconds
        self._limit_seconds = limit_seconds
        self._period = seconds / LOOKS_PER_STALL
        self._began, self._ended = began, ended
        self._entries = entries
        self._watched = 0
        self._processor: Callable[[], float] = time.thread_time
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="areal stall watch", daemon=True)
        self._run: FrameType | None = None
        self._since = 0.0
        self._stall: Stall | None = None
        self._too_long: FrameType | None = None
        """The callback that is to be interrupted."""
        self._handler_before: Any = None

    def start(self) -> None:
        """Watch the event loop of the calling thread."""
        self._watched = threading.get_ident()
        self._processor = _processor_clock(self._watched)
        if self._limit_seconds is not None and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(INTERRUPT, self._interrupt)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._handler_before is not None and not self._thread.is_alive():  # a late signal must find our handler
            signal.signal(INTERRUPT, self._handler_before)

    def _watch(self) -> None:
        looked, used = time.monotonic(), self._processor()
        while not self._stop.wait(self._period):
            callback, now, used_now = running_callback(self._watched), time.monotonic(), self._processor()
            # A call that keeps Python's lock keeps this thread from looking too; it shows as the loop's processor time.
            locked = now - looked > self._seconds and used_now - used > self._seconds / 2
            self._look(callback, now, began=looked if locked else (looked + now) / 2)
            looked, used = now, used_now
        self._end(time.monotonic())

    def _look(self, callback: Callback | None, now: float, *, began: float) -> None:
        """`began` is when something that was not there at the last look is thought to have begun."""
        frame = callback.frame if callback else None
        if frame is not self._run:
            self._end(began)
            self._run, self._since = frame, began
        if callback is None or self._stall is not None:
            self._limit(now)
            return
        if callback.is_importing:
            self._since = now
        elif now - self._since >= self._seconds:
            self._begin(callback, now)

    def _begin(self, callback: Callback, now: float) -> None:
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
        self._began(self._stall)

    def _limit(self, now: float) -> None:
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

    def _end(self, when: float) -> None:
        stall, self._stall, self._too_long = self._stall, None, None
        if stall is not None:
            self._ended(replace(stall, seconds=max(stall.seconds, when - self._since)))


def _processor_clock(thread_id: int) -> Callable[[], float]:
    """Processor time of another thread of this process, where the system tells it; else always 0."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread_id)
    return lambda: time.clock_gettime(clock)
