"""The threads and processes behind a `ProcessPool`: a queue, and owners that each keep one worker process.

Each process is started, waited for and replaced by the one thread that owns it. Processes start when there is work, and
one that dies is replaced at once.
"""

import os
import threading
import time

from areal.utils.logging import getLogger
from areal.utils.process_batch import Batch, Failed, NotStarted
from areal.utils.process_call import Call, PackedFunction
from areal.utils.process_child import Child, Limits
from areal.utils.process_errors import CallCrashed, CallError, CallExhausted, CallTimeout, PoolClosed
from areal.utils.process_queue import CallQueue

_JOIN_SECONDS = 15.0


class Crew:
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

    def add(self, call: Call) -> None:
        with self._lock:
            if self._closed:
                raise PoolClosed(f"{call.function.name} was submitted to a closed process pool; make another")
            self._queue.append(call)
            self._staff()

    def give_back(self, calls: list[Call]) -> None:
        """Calls that were taken and did not begin, to be run before all others."""
        with self._lock:
            if not self._closed:
                self._queue.put_back(calls)
                self._staff()
                return
        _refuse(calls)

    def take(self) -> list[Call]:
        """The next calls for one process; none when the pool closes."""
        with self._wake:
            while not self._closed:
                if calls := self._queue.cut():
                    return calls
                self._waiting += 1
                self._wake.wait()
                self._waiting -= 1
            return []

    def note_pace(self, call: Call, seconds: float) -> None:
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
            thread = threading.Thread(target=Owner(self).work, name="process-pool", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._wake.notify(len(self._queue))


class Owner:
    """A thread and the one process it owns."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._child: Child | None = None

    def work(self) -> None:
        while calls := self._crew.take():
            self._serve(calls)
            del calls  # the results that these hold belong to whoever waits for them
        self._drop()

    def _serve(self, calls: list[Call]) -> None:
        failed = self._run(calls)
        # Before settling, so that whoever sees a failure finds the pool at its full size.
        self._heal(calls[0].function)
        for call, failure in failed:
            if self._crew.closed:
                failure = PoolClosed(f"{call.function.name} was running when its process pool was closed")
            call.settle(error=failure)

    def _run(self, calls: list[Call]) -> Failed:
        try:
            return self._run_in_child(calls)
        except NotStarted as error:
            return self._not_started(calls, error.failure)
        except PoolClosed as error:
            return [(call, error) for call in calls]
        except OSError as error:
            text = f"{calls[0].function.name} never began: no worker process could be started ({error})"
            return [(call, CallCrashed(text)) for call in calls]

    def _run_in_child(self, calls: list[Call]) -> Failed:
        child = self._child = self._child or self._crew.hire()
        batch = Batch(child, calls, self._crew.give_back)
        failed = batch.run(self._crew.load_seconds)
        if batch.seconds_per_call is not None:
            self._crew.note_pace(calls[0], batch.seconds_per_call)
        return failed

    def _not_started(self, calls: list[Call], failure: CallError) -> Failed:
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


def _refuse(calls: list[Call]) -> None:
    for call in calls:
        call.settle(error=PoolClosed(f"{call.function.name} was queued when its process pool was closed"))
