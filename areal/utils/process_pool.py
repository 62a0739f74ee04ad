"""Run functions in worker processes that can be killed: a hung, crashing or greedy call hurts nobody else.

`ProcessPool.submit` may be called from any thread, `run` in any event loop. The pool refuses to retry: a call that
began is never run twice.
"""

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from areal.utils.process_call import Call, PackedFunction
from areal.utils.process_child import Limits
from areal.utils.process_crew import Crew
from areal.utils.process_errors import (
    CallCrashed,
    CallError,
    CallExhausted,
    CallFailed,
    CallTimeout,
    LoadFailed,
    PoolClosed,
)
from areal.utils.process_inbox import LoopInbox

__all__ = [
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
    "usable_cores",
]


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessPool:
    """At most `size` worker processes (default: one per usable core), started on demand, until `close`."""

    def __init__(self, size: int | None = None, limits: Limits | None = None, load_seconds: float = 60.0) -> None:
        """`load_seconds` bounds starting a process and importing what a function needs, which no deadline pays for."""
        self.size = usable_cores() if size is None else size
        if self.size < 1:
            raise ValueError(f"a process pool needs size >= 1, got {size}; leave it out for one per core")
        self._crew = Crew(self.size, limits or Limits(), load_seconds)
        # Threads hold the crew, not the pool, so dropping the pool closes it; finalize also runs at interpreter exit.
        self._finalizer = weakref.finalize(self, self._crew.close)
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = weakref.WeakKeyDictionary()

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
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be > 0, got {timeout_seconds}")
        packed = function if isinstance(function, PackedFunction) else PackedFunction.of(function)
        call = Call(packed, packed.pack_arguments(args, kwargs or {}), timeout_seconds)
        self._crew.add(call)
        return call.future

    async def run(
        self,
        function: Callable[..., Any] | PackedFunction,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float,
    ) -> Any:
        """`submit`, awaited. Cancelling it cancels the call."""
        inbox = self._inboxes.setdefault(asyncio.get_running_loop(), LoopInbox())
        return await inbox.result(self.submit(function, args, kwargs, timeout_seconds=timeout_seconds))

    def pids(self) -> list[int]:
        """The worker processes that live now."""
        return self._crew.pids()

    def close(self) -> None:
        """Kill every worker process and fail what is queued or running; harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
