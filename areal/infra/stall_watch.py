"""Finds code that holds an event loop, while it does: a thread looks at the loop's own a few times per second.

The loop itself does nothing for it. A callback that is seen again and again without an end is a stall from `seconds`
on: it is told at once, and once more with its duration when it is over. Durations are true to within one look. Time
spent importing does not count: that happens once, and an SDK's first call does it.

A callback that waits for its own event loop (a synchronous client that asks the proxy of its own process) would wait
for ever: on the main thread, at a limit, `LoopBlocked` is raised inside of it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

from areal.api.messages import Stall
from areal.infra import workflow_context
from areal.infra.stack import Callback, callback_of, running_callback

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
