"""Run functions in worker processes that can be killed: a hanging, crashing or greedy call fails alone.

`ProcessPool.submit` may be called from any thread, `run` in any event loop; `SHARED` holds the pools that all code of
this process shares. The pool does not retry: a call that began is never run twice.

A function and its arguments travel pickled. Its result comes back as data: plain values, tuples and numpy arrays (torch
tensors arrive as arrays); anything else is refused. What a call changes in its process (environment, working
directory, builtins, …: `process_state`) is undone when it ends, and the processes that it started are killed.
"""

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from areal.utils.closing import Closing
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
    ResultRefused,
)
from areal.utils.process_pool.child import Limits
from areal.utils.process_pool.workers import Workers

__all__ = [
    "SHARED",
    "CallCrashed",
    "CallError",
    "CallExhausted",
    "CallFailed",
    "CallTimeout",
    "Limits",
    "LoadFailed",
    "PackedFunction",
    "PoolClosed",
    "ProcessPool",
    "ResultRefused",
    "usable_cores",
]

_LEAST_MEMORY_BYTES = 2 << 30


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessPool(Closing):
    """At most `size` worker processes (default: one per usable core), started on demand, until `close`."""

    def __init__(self, size: int | None = None, limits: Limits | None = None, load_seconds: float = 60.0) -> None:
        """`load_seconds` bounds starting a process and importing what a function needs, apart from any deadline."""
        self.size = usable_cores() if size is None else size
        if self.size < 1:
            raise ValueError(f"a process pool needs size >= 1, got {size}; leave it out for one per core")
        self._workers = Workers(self.size, limits or Limits(), load_seconds)
        # Threads hold the workers, not the pool, so dropping the pool closes it. At interpreter exit finalize runs too.
        self._finalizer = weakref.finalize(self, self._workers.close)
        self._loop_calls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCalls] = weakref.WeakKeyDictionary()

    def submit(
        self,
        function: Callable[..., Any] | PackedFunction,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float,
    ) -> "Future[Any]":
        """The future result. The deadline runs from the moment the function begins, not while the call is queued.

        The future ends with the result or a `CallError`. Cancelling it takes it from the queue or kills its process.
        """
        call = _new_call(function, args, kwargs, timeout_seconds)
        self._workers.add([call])
        return call

    async def run(
        self,
        function: Callable[..., Any] | PackedFunction,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float,
    ) -> Any:
        """`submit`, awaited. Cancelling it cancels the call."""
        loop = asyncio.get_running_loop()
        calls = self._loop_calls.get(loop)
        if calls is None:
            calls = self._loop_calls[loop] = _LoopCalls(self._workers)
        return await calls.result(_new_call(function, args, kwargs, timeout_seconds))

    def pids(self) -> list[int]:
        """The worker processes that are alive now."""
        return self._workers.pids()

    def spares(self) -> list[int]:
        """The processes that are ready to take the place of one that is killed."""
        return self._workers.spares()

    def supervisors(self) -> list[int]:
        """The processes started here, with the worker processes below them."""
        return [] if self._workers.server_pid is None else [self._workers.server_pid]

    def close(self) -> None:
        """Kill every worker process and fail what is queued or running; harmless when repeated."""
        self._finalizer()


def _new_call(
    function: Callable[..., Any] | PackedFunction,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    timeout_seconds: float,
) -> PoolCall:
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds must be > 0, got {timeout_seconds}")
    packed = function if isinstance(function, PackedFunction) else PackedFunction.of(function)
    return PoolCall(packed, packed.pack_arguments(args, kwargs or {}), timeout_seconds)


class _LoopCalls:
    """Calls of one event loop on their way to the pool's threads, and their results on the way back.

    Calls of one turn of the loop leave together, and the loop is woken once for all results that have arrived. Waking a
    thread or a loop costs a system call and a fight for the interpreter; one per result (`asyncio.wrap_future`) costs
    more than a small call. Invariant: while something is in `_arrived`, a `_deliver` is due in the loop.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._leaving: list[PoolCall] = []
        self._arrived: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._due = False

    async def result(self, call: PoolCall) -> Any:
        """What `call` ends with, awaited in the running loop. Cancelling this cancels it."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        call.add_done_callback(lambda done: self._put(waiter, done))
        if not self._leaving:
            loop.call_soon(self._send)
        self._leaving.append(call)
        try:
            return await waiter
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _send(self) -> None:
        calls, self._leaving = self._leaving, []
        self._workers.add(calls)

    def _put(self, waiter: "asyncio.Future[Any]", done: "Future[Any]") -> None:
        loop = waiter.get_loop()
        if loop.is_closed():
            return
        self._arrived.append((waiter, done))
        # Two threads may both find it not due: then it runs once needlessly.
        if not self._due:
            self._due = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._due = False  # before looking, so that what comes from now on is delivered by another
        while self._arrived:
            waiter, done = self._arrived.popleft()
            if waiter.done():
                continue  # cancelled
            if done.cancelled():  # by another thread, while its waiter was not
                waiter.cancel()
                continue
            error = done.exception()
            if error is None:
                waiter.set_result(done.result())
            else:
                waiter.set_exception(error)


class SharedPools:
    """The pools of this process, one for each size and limits, made when first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[int, int | None, Limits | None], ProcessPool] = {}

    def get(self, size: int | None = None, limits: Limits | None = None) -> ProcessPool:
        """The pool of this size (default: one process per usable core) and these limits (default: a fair share)."""
        # A fork inherits this object but not the threads of its pools, hence the process id.
        pid = os.getpid()
        with self._lock:
            pool = self._pools.get((pid, size, limits))
            if pool is None:
                number = size or usable_cores()
                full = (pid, number, limits or _fair_limits(number))
                pool = self._pools.get(full) or ProcessPool(*full[1:])
                self._pools[full] = self._pools[pid, size, limits] = pool
            return pool

    def supervisors(self) -> list[int]:
        """Those of all pools of this process."""
        with self._lock:
            pools = {id(pool): pool for (pid, _, _), pool in self._pools.items() if pid == os.getpid()}
        return [pid for pool in pools.values() for pid in pool.supervisors()]


def _fair_limits(size: int) -> Limits:
    """Half of the machine's memory divided among `size` processes, but at least 2 GiB each; CPU time unlimited."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limits(memory_bytes=max(_LEAST_MEMORY_BYTES, total // 2 // size))


SHARED: Final = SharedPools()
"""One object for the whole process on purpose: what wants a pool is made by user code and by unpickling, where no pool
could be passed in, and what a pool rations (cores, memory) belongs to the process as well. It holds nothing until the
first call, and its pools end with the interpreter."""
