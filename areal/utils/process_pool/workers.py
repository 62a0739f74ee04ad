"""Calls that wait for a process, and how many of them are worth sending together.

Quick calls of one function travel together, as many as take about ten milliseconds; a call that takes longer, or whose
pace is not known yet, travels alone. Nothing is kept back to fill a batch, and no process gets more than its share of
what is queued. Not for several threads at once.
"""

# MERGED-DOC
# Calls of one function that were sent to one worker process together, and run there one after the other.
#
# Invariant: every call is settled, returned as failed, or given back, exactly once; none that began is given back. A call
# that hangs or ends the process costs the others a moment: what has finished is settled as it arrives, and what has not
# begun is taken from the process and given back.
# The threads and processes behind a `ProcessPool`: a queue, and owners that each keep one worker process.
#
# Each process is started, waited for and replaced by the one thread that owns it. Processes start when there is work, and
# one that dies is replaced at once.

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

from areal.utils.logging import getLogger
from areal.utils.process_pool.calls import (
    CallCrashed,
    CallError,
    CallExhausted,
    CallFailed,
    CallTimeout,
    LoadFailed,
    PackedFunction,
    PoolCall,
    PoolClosed,
)
from areal.utils.process_pool.channel import EXHAUSTED_STATUS, PoolChannelClosed
from areal.utils.process_pool.child import Child, Limits

_BATCH_SECONDS = 0.01
_BATCH_CALLS = 64
_BATCH_BYTES = 1 << 18
_MAX_PACES = 1024
_NEWEST_WEIGHT = 0.5


class CallQueue:
    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._calls: deque[PoolCall] = deque()
        self._paces: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, call: PoolCall) -> None:
        self._calls.append(call)

    def put_back(self, calls: list[PoolCall]) -> None:
        self._calls.extendleft(reversed(calls))

    def clear(self) -> list[PoolCall]:
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def note_pace(self, call: PoolCall, seconds: float) -> None:
        digest = call.function.digest
        if len(self._paces) >= _MAX_PACES:
            self._paces.clear()
        before = self._paces.get(digest, seconds)
        self._paces[digest] = before + _NEWEST_WEIGHT * (seconds - before)

    def cut(self) -> list[PoolCall]:
        """The calls for one process, from the front; those cancelled meanwhile are dropped."""
        batch: list[PoolCall] = []
        room, room_bytes = 1, _BATCH_BYTES
        while self._calls and len(batch) < room:
            call = self._calls[0]
            if batch and not (_alike(call, batch[0]) and len(call.body) <= room_bytes):
                break
            self._calls.popleft()
            if call.future.cancelled():
                call.settle()
                continue
            if not batch:
                room = self._room(call)
            batch.append(call)
            room_bytes -= len(call.body)
        return batch

    def _room(self, call: PoolCall) -> int:
        pace = self._paces.get(call.function.digest)
        if pace is None or call.alone:
            return 1
        share = -(-(len(self._calls) + 1) // self._processes)
        return max(1, min(_BATCH_CALLS, share, int(_BATCH_SECONDS / max(pace, 1e-9))))


def _alike(call: PoolCall, other: PoolCall) -> bool:
    return not call.alone and call.function.digest == other.function.digest


_PATIENCE_SECONDS = 0.05
"""How long one call may take before those behind it are given to another process."""

Failed = list[tuple[PoolCall, CallError]]


class NotStarted(Exception):
    """The process ended, or took too long, before the first call began."""

    def __init__(self, failure: CallError) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """What that means for a call that was sent alone."""


class Batch:
    def __init__(self, child: Child, calls: list[PoolCall], give_back: Callable[[list[PoolCall]], None]) -> None:
        self._child = child
        self._calls = calls
        self._give_back = give_back
        self._replies = 0
        self._end = len(calls)
        """Calls from here on were given back."""
        self._certain = len(calls) == 1
        """Whether all calls before `_end` are known to have begun."""
        self._started = self._began = 0.0
        """When the first call began, and when the one did that runs now."""

    @property
    def seconds_per_call(self) -> float | None:
        """Of the calls that came to an end; None if none did."""
        return (self._began - self._started) / self._replies if self._replies else None

    def run(self, load_seconds: float) -> Failed:
        """Settle the calls that return or raise. Returns those that ended otherwise, for the caller to settle."""
        if self._certain:
            self._calls[0].enter(self._child)
        try:
            self._begin(load_seconds)
            return self._finish()
        except LoadFailed as error:
            return [(call, error) for call in self._calls]
        except NotStarted:
            raise
        except Exception as error:  # whatever a process that lost its mind can answer: nobody may wait for ever
            self._child.usable = False
            self._take_back()
            failure = CallCrashed(f"{self._calls[0].function.name} left its process without sense: {error!r}")
            return [(call, failure) for call in self._calls[self._replies : self._end]]
        finally:
            self._calls[self._end - 1].leave()

    def _begin(self, load_seconds: float) -> None:
        function = self._calls[0].function
        deadline = time.monotonic() + load_seconds
        try:
            self._child.begin(function, [call.body for call in self._calls], deadline)
        except PoolChannelClosed:
            raise NotStarted(how_it_ended(self._child, f"loading {function.name}")) from None
        except TimeoutError:
            self._child.usable = False
            text = f"{function.name} and its arguments took over {load_seconds:g} s to load"
            raise NotStarted(CallTimeout(text)) from None

    def _finish(self) -> Failed:
        self._started = self._began = time.monotonic()
        while self._replies < self._end:
            call = self._calls[self._replies]
            try:
                self._settle_next(call)
            except TimeoutError:
                self._child.usable = False
                return [(call, CallTimeout(f"{call.function.name} was killed after {call.timeout_seconds:g} s"))]
            except PoolChannelClosed:
                self._take_back()
                failure = how_it_ended(self._child, call.function.name)
                # If it died between two calls, it was none's doing.
                return [(call, failure)] if self._replies < self._end else []
        return []

    def _settle_next(self, call: PoolCall) -> None:
        deadline = self._began + call.timeout_seconds
        if self._replies == self._end - 1:
            self._certain = True
            call.enter(self._child)
        if not self._certain:
            try:
                return self._settle(call, min(deadline, self._began + _PATIENCE_SECONDS))
            except TimeoutError:
                return self._take_back()
        return self._settle(call, deadline)

    def _settle(self, call: PoolCall, deadline: float) -> None:
        try:
            result, failure = self._child.reply(call.function, deadline), None
        except CallFailed as error:
            result, failure = None, error
        self._replies += 1
        self._began = time.monotonic()
        call.leave()
        call.settle(result, failure)

    def _take_back(self) -> None:
        self._certain = True
        if count := self._child.take_back():
            self._end -= count
            self._give_back(self._calls[self._end :])


def how_it_ended(child: Child, what: str) -> CallCrashed:
    status = child.end()
    if status == EXHAUSTED_STATUS:
        return CallExhausted(f"{what} needs more memory than its process may have")
    if status is None:
        return CallCrashed(f"{what} left process {child.pid}, which does not end when killed")
    # Real-time signals have no names.
    names = {known.value: known.name for known in signal.Signals}
    how = f"exit status {status}" if status >= 0 else f"killed by {names.get(-status, f'signal {-status}')}"
    return CallCrashed(f"{what} ended its process: {how}")


_JOIN_SECONDS = 15.0


class Workers:
    """The queue, the threads and their processes. Invariant: every live process is in `_children` unless closed."""

    def __init__(self, size: int, limits: Limits, load_seconds: float) -> None:
        self.load_seconds = load_seconds
        self._size = size
        self._limits = limits
        # Re-entrant, because the garbage collector may close the pool in a thread that holds it.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._queue = CallQueue(size)
        self._waiting = 0
        self._threads: list[threading.Thread] = []
        self._children: set[Child] = set()
        self._closed = False
        self._owner = os.getpid()

    def add(self, call: PoolCall) -> None:
        with self._lock:
            if self._closed:
                raise PoolClosed(f"{call.function.name} was submitted to a closed process pool; make another")
            self._queue.append(call)
            self._staff()

    def give_back(self, calls: list[PoolCall]) -> None:
        """Calls that were taken and did not begin, to be run before all others."""
        with self._lock:
            if not self._closed:
                self._queue.put_back(calls)
                self._staff()
                return
        _refuse(calls)

    def take(self) -> list[PoolCall]:
        """The next calls for one process; none when the pool closes."""
        with self._wake:
            while not self._closed:
                if calls := self._queue.cut():
                    return calls
                self._waiting += 1
                self._wake.wait()
                self._waiting -= 1
            return []

    def note_pace(self, call: PoolCall, seconds: float) -> None:
        """How long calls like this one take; decides how many are sent together."""
        with self._lock:
            self._queue.note_pace(call, seconds)

    def hire(self) -> Child:
        child = Child(self._limits)
        with self._lock:
            if not self._closed:
                self._children.add(child)
                return child
        child.end()
        raise PoolClosed("the process pool was closed")

    def dismiss(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._children.discard(child)

    def pids(self) -> list[int]:
        with self._lock:
            return sorted(child.pid for child in self._children if child.alive())

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork's copy: the processes are the original's
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
            queued = self._queue.clear()
            self._wake.notify_all()
        _refuse(queued)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _staff(self) -> None:
        """See to it that someone takes what is queued."""
        if len(self._queue) > self._waiting and len(self._threads) < self._size:
            # A daemon, because a thread that waits for work must not keep the interpreter alive; the pool's finalizer
            # ends it.
            thread = threading.Thread(target=WorkerThread(self).work, name="process-pool", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._wake.notify(len(self._queue))


class WorkerThread:
    """A thread and the one process it owns."""

    def __init__(self, crew: Workers) -> None:
        self._crew = crew
        self._child: Child | None = None

    def work(self) -> None:
        while calls := self._crew.take():
            self._serve(calls)
            del calls  # the results that these hold belong to whoever waits for them
        self._drop()

    def _serve(self, calls: list[PoolCall]) -> None:
        failed = self._run(calls)
        # Before settling, so that whoever sees a failure finds the pool at its full size.
        self._heal(calls[0].function)
        for call, failure in failed:
            if self._crew.closed:
                failure = PoolClosed(f"{call.function.name} was running when its process pool was closed")
            call.settle(error=failure)

    def _run(self, calls: list[PoolCall]) -> Failed:
        try:
            return self._run_in_child(calls)
        except NotStarted as error:
            return self._not_started(calls, error.failure)
        except PoolClosed as error:
            return [(call, error) for call in calls]
        except OSError as error:
            text = f"{calls[0].function.name} never began: no worker process could be started ({error})"
            return [(call, CallCrashed(text)) for call in calls]

    def _run_in_child(self, calls: list[PoolCall]) -> Failed:
        child = self._child = self._child or self._crew.hire()
        batch = Batch(child, calls, self._crew.give_back)
        failed = batch.run(self._crew.load_seconds)
        if batch.seconds_per_call is not None:
            self._crew.note_pace(calls[0], batch.seconds_per_call)
        return failed

    def _not_started(self, calls: list[PoolCall], failure: CallError) -> Failed:
        """An idle process may have died by itself, and of many calls any may be the cause: each is tried again, alone.

        A call that was tried alone, or is to blame for sure, has failed.
        """
        if len(calls) == 1 and (calls[0].alone or isinstance(failure, CallTimeout | CallExhausted)):
            return [(calls[0], failure)]
        for call in calls:
            call.alone = True
        self._crew.give_back(calls)
        return []

    def _heal(self, function: PackedFunction) -> None:
        """Replace a process that is of no use before the next call needs it."""
        if self._child is None or self._child.usable:
            return
        was_loaded = self._child.knows(function)
        self._drop()
        try:
            self._child = self._crew.hire()
        except PoolClosed:
            return
        except OSError as error:
            getLogger("process_pool").warning("a worker process could not be replaced yet: %s", error)
            return
        if was_loaded:  # else it may be what ended the process
            self._child.warm(function, time.monotonic() + self._crew.load_seconds)

    def _drop(self) -> None:
        if self._child is not None:
            self._crew.dismiss(self._child)
            self._child = None


def _refuse(calls: list[PoolCall]) -> None:
    for call in calls:
        call.settle(error=PoolClosed(f"{call.function.name} was queued when its process pool was closed"))
