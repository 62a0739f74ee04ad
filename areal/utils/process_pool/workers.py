"""The queue of a `ProcessPool`, and its threads, each of which owns one worker process.

A thread serves its process and replaces it. It sends several calls of one function at a time, which run one after
the other: a round trip for each would cost more than a small call.

Once a process had to be replaced, spares are kept (`Spares`), and a thread that loses its process goes on with one. The
end of the lost one, and the failure of the call that it ended with, are left to another thread (`_Ending`): a call has
failed when nothing of it runs any more.

Invariants:
- A call is settled or put back into the queue, exactly once for each time it was taken; one that began is never put
  back, so no call runs twice.
- A call that hangs, crashes or is slow costs those that were sent with it a moment: what has not begun by then goes to
  another process.
- A process ends with the pool at the latest; until then it is in `Workers._children` or among the spares.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
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
MOST_SPARES = 2
"""Of one pool: calls often hang together, and then their processes are lost together."""
SPARE_SECONDS = 60.0
"""For how long spares are kept when none is needed."""


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
        self._spares = Spares(self, min(size, MOST_SPARES))
        self._endings: set[_Ending] = set()
        self._owner = os.getpid()
        self.closed = False

    def add(self, calls: Sequence[PoolCall]) -> None:
        """Those that come together are sent together: a thread that is woken by the first alone takes it alone."""
        with self._lock:
            if not self.closed:
                self._queue.extend(calls)
                self._wake_for(len(calls))
                return
        for call in calls:
            name = call.function.name
            call.settle(error=PoolClosed(f"{name} was submitted to a closed process pool; make another"))

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

    def new_child(self) -> Child:
        """Raises OSError if no process can be started."""
        return Child(self._server, self._limits, self._load_seconds)

    def start_child(self, *, spare: bool = True) -> Child:
        """A process for a thread, by preference a spare. Raises OSError as `new_child` does."""
        child = (self._spares.take() if spare else None) or self.new_child()
        with self._lock:
            if not self.closed:
                self._children.add(child)
                return child
        child.end()
        raise PoolClosed("the process pool was closed")

    def end_lost(self, child: Child, calls: Sequence[PoolCall], failure: "CallError | _Crash | None") -> None:
        """End a process that is of no use, and fail those calls when it has ended."""
        ending = _Ending(self, child, calls, failure)
        with self._lock:
            begun = not self.closed
            if begun:
                self._endings.add(ending)
                ending.start()
        if not begun:  # nobody is waiting, and an interpreter that ends starts no threads
            ending.run()

    def ended(self, ending: "_Ending") -> None:
        with self._lock:
            self._endings.discard(ending)

    def keep_spares(self, function: PackedFunction) -> None:
        """A process that ran this function had to be replaced: be ready for the next one."""
        self._spares.keep(function)

    def end_child(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._children.discard(child)

    def pids(self) -> list[int]:
        with self._lock:
            return sorted(child.pid for child in self._children if child.alive())

    def spares(self) -> list[int]:
        return self._spares.pids()

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
        self._spares.close()
        _refuse(queued)
        for thread in [*self._threads, *self._endings]:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._server.close()  # last: it says how the others ended

    def _wake_for(self, count: int) -> None:
        while len(self._threads) < self._size and len(self._queue) > sum(not thread.calls for thread in self._threads):
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
            if call.cancelled():
                call.settle()
                continue
            calls.append(call)
            bytes_left -= len(call.arguments)
        return calls


class Spares:
    """Processes that wait to take the place of one that is lost, with the function loaded for which one was.

    There are none before the first is lost, nor once none was needed for `SPARE_SECONDS`. One that cannot be started or
    cannot load the function is done without until the next is lost.
    """

    def __init__(self, workers: Workers, most: int) -> None:
        self._workers = workers
        self._most = most
        self._wake = threading.Condition()
        self._ready: list[Child] = []
        self._loading: Child | None = None
        self._function: PackedFunction | None = None
        """What to load; None = no spares are kept."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, function: PackedFunction) -> None:
        with self._wake:
            if self._closed:
                return
            self._function = function
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="process-pool-spares", daemon=True)
                self._thread.start()
            self._wake.notify()

    def take(self) -> Child | None:
        """One that is alive, if there is any."""
        with self._wake:
            while self._ready:
                child = self._ready.pop(0)
                self._wake.notify()
                if child.alive():
                    return child
                self._workers.end_lost(child, (), None)
        return None

    def pids(self) -> list[int]:
        with self._wake:
            return [child.pid for child in self._ready if child.alive()]

    def close(self) -> None:
        with self._wake:
            self._closed = True
            if self._loading is not None:
                self._loading.kill()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        while self._ready:
            self._ready.pop().end()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            try:
                child = self._workers.new_child()
            except OSError as error:
                getLogger("process_pool").warning("no spare process could be started yet: %s", error)
                self._stop(function)
                continue
            with self._wake:
                self._loading = child
                if self._closed:
                    child.kill()
            try:
                child.load(function)
            except (CallError, PoolChannelClosed):  # whoever calls it will be told
                child.end()
                self._stop(function)
            else:
                with self._wake:
                    self._ready.append(child)
            self._loading = None

    def _next(self) -> PackedFunction | None:
        """Wait until a spare is to be made, and for which function; None = never again."""
        with self._wake:
            while not self._closed:
                if self._function is not None and len(self._ready) < self._most:
                    return self._function
                if not self._wake.wait(SPARE_SECONDS if self._ready else None):
                    self._function = None
                    while self._ready:
                        self._workers.end_lost(self._ready.pop(), (), None)
        return None

    def _stop(self, function: PackedFunction) -> None:
        with self._wake:
            if self._function is function:
                self._function = None


class _Crash(Exception):
    """The process ended, or sent nonsense; how it ended is known when it was reaped."""

    def __init__(self, what: str, noticed_by: PoolChannelClosed, *, none_began: bool) -> None:
        super().__init__(what)
        self.what = what
        self.noticed_by = noticed_by
        self.none_began = none_began
        """It ended before the first of the calls began."""


class _Ending(threading.Thread):
    """The end of a lost process, and of the calls that fail with it."""

    def __init__(
        self, workers: Workers, child: Child, calls: Sequence[PoolCall], failure: "CallError | _Crash | None"
    ) -> None:
        super().__init__(name="process-pool-ending", daemon=True)
        self._workers = workers
        self._child = child
        self._calls = calls
        self._failure = failure

    def run(self) -> None:
        failure = self._failure
        if isinstance(failure, _Crash):
            failure = self._child.crash(failure.what, failure.noticed_by)
        self._workers.end_child(self._child)
        _fail(self._calls, failure, self._workers.closed)
        self._workers.ended(self)


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
        failed = list(self.calls)
        # Before the calls fail, so that the pool is full again when that is visible.
        lost = self._replace_child(function)
        self.calls.clear()
        if lost is not None:
            self._workers.end_lost(lost, failed, failure)
        else:
            assert not isinstance(failure, _Crash), "a process that crashed is of no use"
            _fail(failed, failure, self._workers.closed)

    def _run(self, function: PackedFunction) -> CallError | _Crash | None:
        """Run the calls, settling those that return or raise.

        Calls still in `calls` afterwards fail with the returned error.
        """
        try:
            try:
                self._run_in_child(function)
            except _Crash as crash:  # an idle process may have died by itself; a new one leaves no doubt
                if not crash.none_began:
                    raise
                lost = self._replace_child(function, spare=False)
                assert lost is not None, "a process that crashed is of no use"
                self._workers.end_lost(lost, (), None)
                self._run_in_child(function)
        except (CallError, _Crash) as error:
            return error
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
            child.usable = False
            unbegun = child.take_back()
            if unbegun == sent:
                raise _Crash(f"loading {function.name}", error, none_began=True) from None
            self._put_back(unbegun)
            if self.calls:  # else it died between two calls
                raise _Crash(function.name, error, none_began=False) from None
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

    def _replace_child(self, function: PackedFunction, *, spare: bool = True) -> Child | None:
        """Kill a process that is of no use and go on with another, before the next call needs it; returns the first."""
        lost = self._child
        if lost is None or lost.usable:
            return None
        lost.kill()
        self._child = None
        try:
            self._child = self._workers.start_child(spare=spare)
        except PoolClosed:
            return lost
        except OSError as error:
            getLogger("process_pool").warning("a worker process could not be replaced yet: %s", error)
        self._workers.keep_spares(function)
        return lost

    def _end_child(self) -> None:
        if self._child is not None:
            self._workers.end_child(self._child)
            self._child = None


def _fail(calls: Sequence[PoolCall], failure: CallError | None, closed: bool) -> None:
    for call in calls:
        if closed:
            failure = PoolClosed(f"{call.function.name} was running when its process pool was closed")
        call.settle(error=failure)


def _refuse(calls: list[PoolCall]) -> None:
    for call in calls:
        call.settle(error=PoolClosed(f"{call.function.name} was queued when its process pool was closed"))
