"""The threads and processes behind a `ProcessPool`: a queue, and owners that each keep one worker process.

Each process is started, waited for and replaced by the one thread that owns it. Processes start when there is work, and
one that dies is replaced at once.
"""

import os
import threading
from collections import deque
from typing import Any

from areal.utils.logging import getLogger
from areal.utils.process_call import Call
from areal.utils.process_child import Child, Limits, NotStarted
from areal.utils.process_errors import CallCrashed, PoolClosed

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
        self._calls: deque[Call] = deque()
        self._waiting = 0
        self._threads: list[threading.Thread] = []
        self._children: set[Child] = set()
        self._closed = False
        self._owner = os.getpid()

    def add(self, call: Call) -> None:
        with self._lock:
            if self._closed:
                raise PoolClosed(f"{call.function.name} was submitted to a closed process pool; make another")
            self._calls.append(call)
            if len(self._calls) > self._waiting and len(self._threads) < self._size:
                self._threads.append(_start_owner(self))
            self._wake.notify()

    def take(self) -> Call | None:
        """The next call that is still wanted, or None when the pool closes."""
        while (call := self._next()) is not None and call.future.cancelled():
            call.settle()
        return call

    def _next(self) -> Call | None:
        with self._wake:
            while not self._calls and not self._closed:
                self._waiting += 1
                self._wake.wait()
                self._waiting -= 1
            return None if self._closed else self._calls.popleft()

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
            queued = list(self._calls)
            self._calls.clear()
            self._wake.notify_all()
        for call in queued:
            call.settle(error=PoolClosed(f"{call.function.name} was queued when its process pool was closed"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)


def _start_owner(crew: Crew) -> threading.Thread:
    # A daemon, because a thread that waits for work must not keep the interpreter alive; the pool's finalizer ends it.
    thread = threading.Thread(target=Owner(crew).work, name="process-pool", daemon=True)
    thread.start()
    return thread


class Owner:
    """A thread and the one process it owns."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._child: Child | None = None

    def work(self) -> None:
        while (call := self._crew.take()) is not None:
            self._serve(call)
            del call
        self._drop()

    def _serve(self, call: Call) -> None:
        try:
            result, failure = self._run(call), None
        except Exception as error:
            result, failure = None, self._explain(call, error)
        # Before settling, so that whoever sees a failure finds the pool at its full size.
        self._heal()
        call.settle(result, failure)

    def _run(self, call: Call) -> Any:
        try:
            return self._run_in_child(call)
        except NotStarted:
            if call.future.cancelled():
                raise
            # An idle process died (the kernel was short of memory, say): not this call's doing.
            self._drop()
        try:
            return self._run_in_child(call)
        except NotStarted:
            raise CallCrashed(
                f"{call.function.name} never began: its worker process ended twice while loading"
            ) from None

    def _run_in_child(self, call: Call) -> Any:
        child = self._child = self._child or self._crew.hire()
        call.enter(child)
        try:
            return child.run(call.function, call.body, call.timeout_seconds, self._crew.load_seconds)
        finally:
            call.leave()

    def _explain(self, call: Call, error: Exception) -> Exception:
        if self._crew.closed:
            return PoolClosed(f"{call.function.name} was running when its process pool was closed")
        if isinstance(error, OSError):
            return CallCrashed(f"{call.function.name} never began: no worker process could be started ({error})")
        return error

    def _heal(self) -> None:
        """Replace a process that is of no use before the next call needs it."""
        if self._child is None or self._child.usable:
            return
        self._drop()
        try:
            self._child = self._crew.hire()
        except PoolClosed:
            return
        except OSError as error:
            getLogger("process_pool").warning("a worker process could not be replaced yet: %s", error)

    def _drop(self) -> None:
        if self._child is not None:
            self._crew.dismiss(self._child)
            self._child = None
