"""The queue of a `ProcessPool`, and its threads, each of which owns one worker process.

A thread starts, serves and replaces its process. It sends several calls of one function at a time, which run one after
the other: a round trip for each would cost more than a small call.

Invariants:
- A call is settled or put back into the queue, exactly once for each time it was taken; one that began is never put
  back, so no call runs twice.
- A call that hangs, crashes or is slow costs those that were sent with it a moment: what has not begun by then goes to
  another process.
- A process ends with its thread at the latest; until then it is in `Workers._children`.
"""

import os
import threading
import time
from collections import deque
from typing import Any

from areal.utils.logging import getLogger
from areal.utils.process_pool.calls import CallCrashed, CallError, CallFailed, PackedFunction, PoolCall, PoolClosed
from areal.utils.process_pool.channel import PoolChannelClosed
from areal.utils.process_pool.child import Child, Limits
from areal.utils.process_pool.fork_server import ForkServer

_MAX_CALLS = 64
_MAX_BYTES = 1 << 18
"""How much is sent to a process at once; one call may be larger."""
_TURN_SECONDS = 0.02
"""Calls that were sent together and have not begun after this time go to another process."""
_JOIN_SECONDS = 15.0


class Workers:
    """The threads start on demand, at most `size`."""

    def __init__(self, size: int, limits: Limits, load_seconds: float) -> None:
        self._size = size
        self._limits = limits
        self._load_seconds = load_seconds
        # Re-entrant, because the garbage collector may close the pool in a thread that holds it.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[PoolCall] = deque()
        self._threads: list[_WorkerThread] = []
        self._children: set[Child] = set()
        self._server = ForkServer()
        self._owner = os.getpid()
        self.closed = False

    def add(self, call: PoolCall) -> None:
        with self._lock:
            if self.closed:
                raise PoolClosed(f"{call.function.name} was submitted to a closed process pool; make another")
            self._queue.append(call)
            self._wake_for(1)

    def put_back(self, calls: list[PoolCall]) -> None:
        """Calls that were taken and did not begin, to be run before all others."""
        with self._lock:
            if not self.closed:
                self._queue.extendleft(reversed(calls))
                self._wake_for(len(calls))
                return
        _refuse(calls)

    def take(self, thread: "_WorkerThread") -> bool:
        """Wait for calls and give the thread some, all of one function; False = the pool is closed."""
        with self._wake:
            while not self.closed:
                thread.calls = self._next()
                if thread.calls:
                    return True
                self._wake.wait()
        return False

    def start_child(self) -> Child:
        child = Child(self._server, self._limits, self._load_seconds)
        with self._lock:
            if not self.closed:
                self._children.add(child)
                return child
        child.end()
        raise PoolClosed("the process pool was closed")

    def end_child(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._children.discard(child)

    def pids(self) -> list[int]:
        with self._lock:
            return sorted(child.worker_pid() for child in self._children if child.alive())

    def supervisors(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._children]

    @property
    def server_pid(self) -> int | None:
        return self._server.pid

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork's copy: the processes are the original's
        with self._lock:
            self.closed = True
            for child in self._children:
                child.kill()
            queued = list(self._queue)
            self._queue.clear()
            self._wake.notify_all()
        _refuse(queued)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._server.close()  # last: it says how the others ended

    def _wake_for(self, count: int) -> None:
        if len(self._threads) < self._size and len(self._queue) > sum(not thread.calls for thread in self._threads):
            thread = _WorkerThread(self)
            thread.start()
            self._threads.append(thread)
        self._wake.notify(count)

    def _next(self) -> deque[PoolCall]:
        """Half of a process's share of the queue, so that none is left with much work when the others have finished."""
        calls: deque[PoolCall] = deque()
        limit = min(_MAX_CALLS, -(-len(self._queue) // (2 * self._size)))
        bytes_left = _MAX_BYTES
        while self._queue and len(calls) < limit:
            call = self._queue[0]
            if calls and (call.function.digest != calls[0].function.digest or len(call.arguments) > bytes_left):
                break
            self._queue.popleft()
            if call.future.cancelled():
                call.settle()
                continue
            calls.append(call)
            bytes_left -= len(call.arguments)
        return calls


class _NoneBegan(Exception):
    """The process ended before the first of the calls began."""

    def __init__(self, failure: CallCrashed) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _WorkerThread(threading.Thread):
    """A thread and the one process it owns."""

    def __init__(self, workers: Workers) -> None:
        # A daemon, because a thread that waits for work must not keep the interpreter alive; the pool's finalizer ends
        # it.
        super().__init__(name="process-pool", daemon=True)
        self._workers = workers
        self._child: Child | None = None
        self.calls: deque[PoolCall] = deque()
        """What it has taken and not yet settled or put back; while this is empty, it is free for the next call."""

    def run(self) -> None:
        while self._workers.take(self):
            self._serve()
        self._end_child()

    def _serve(self) -> None:
        function = self.calls[0].function
        failure = self._run(function)
        # Before settling, so that the pool is full again when the failure is visible.
        self._replace_child()
        if self._workers.closed:
            failure = PoolClosed(f"{function.name} was running when its process pool was closed")
        while self.calls:
            self.calls.popleft().settle(error=failure)

    def _run(self, function: PackedFunction) -> CallError | None:
        """Run the calls, settling those that return or raise.

        Calls still in `calls` afterwards fail with the returned error.
        """
        try:
            try:
                self._run_in_child(function)
            except _NoneBegan:  # an idle process may have died by itself; a new one leaves no doubt
                self._replace_child()
                self._run_in_child(function)
        except CallError as error:
            return error
        except _NoneBegan as error:
            return error.failure
        except OSError as error:
            return CallCrashed(f"{function.name} never began: no worker process could be started ({error})")
        return None

    def _run_in_child(self, function: PackedFunction) -> None:
        child = self._child = self._child or self._workers.start_child()
        sent = len(self.calls)
        try:
            self._let_cancel_kill(child)
            child.begin(self.calls)
            turn_ends = time.monotonic() + _TURN_SECONDS
            while self.calls:
                self._settle_first(child, turn_ends)
            child.finish(function)
        except PoolChannelClosed as error:
            unbegun = child.take_back()
            if unbegun == sent:
                raise _NoneBegan(child.crash(f"loading {function.name}", error)) from None
            self._put_back(unbegun)
            failure = child.crash(function.name, error)
            if self.calls:  # else it died between two calls
                raise failure from None
        except CallError:
            raise
        except Exception as error:  # a broken process may answer anything, and no caller may wait for ever
            child.usable = False
            self._put_back(child.take_back())
            raise CallCrashed(f"{function.name} broke its process: {error!r}") from error
        finally:
            for call in self.calls:
                call.kill_on_cancel(None)

    def _settle_first(self, child: Child, turn_ends: float) -> None:
        result, failure = None, None
        try:
            result = self._first_result(child, turn_ends)
        except CallFailed as error:
            failure = error
        call = self.calls.popleft()
        call.kill_on_cancel(None)
        call.settle(result, failure)

    def _first_result(self, child: Child, turn_ends: float) -> Any:
        if len(self.calls) > 1:
            try:
                return child.result(self.calls[0], turn_ends)
            except TimeoutError:
                self._put_back(child.take_back(len(self.calls) - 1))
        self._let_cancel_kill(child)
        return child.result(self.calls[0])

    def _let_cancel_kill(self, child: Child) -> None:
        """A call may take its process down only if no other was sent with it."""
        if len(self.calls) == 1:
            self.calls[0].kill_on_cancel(child)

    def _put_back(self, count: int) -> None:
        """Put the last `count` calls back, which have not begun."""
        if count:
            self._workers.put_back([self.calls.pop() for _ in range(count)][::-1])

    def _replace_child(self) -> None:
        """End a process that is of no use and start another, before the next call needs it."""
        if self._child is None or self._child.usable:
            return
        self._end_child()
        try:
            self._child = self._workers.start_child()
        except PoolClosed:
            return
        except OSError as error:
            getLogger("process_pool").warning("a worker process could not be replaced yet: %s", error)

    def _end_child(self) -> None:
        if self._child is not None:
            self._workers.end_child(self._child)
            self._child = None


def _refuse(calls: list[PoolCall]) -> None:
    for call in calls:
        call.settle(error=PoolClosed(f"{call.function.name} was queued when its process pool was closed"))
