"""The process pools that everyone in this process shares, one per size and limits.

`SHARED` is one object for the whole process on purpose: those who want a pool are made by user code and by unpickling,
where nobody could hand them one, and what a pool rations (cores, memory) belongs to the process as well. It holds
nothing until the first call, and its pools end with the interpreter.
"""

import os
import threading
from typing import Final

from areal.utils.process_pool import Limits, ProcessPool, usable_cores

_LEAST_MEMORY_BYTES = 2 << 30


class SharedPools:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[int, int, Limits], ProcessPool] = {}

    def get(self, size: int | None = None, limits: Limits | None = None) -> ProcessPool:
        """The pool of this size (default: one process per usable core) and these limits (default: a fair share)."""
        size = size or usable_cores()
        limits = limits or fair_limits(size)
        # A fork inherits this object but none of the threads behind its pools, hence the process id.
        key = (os.getpid(), size, limits)
        with self._lock:
            if key not in self._pools:
                self._pools[key] = ProcessPool(size, limits)
            return self._pools[key]


def fair_limits(size: int) -> Limits:
    """Half of the machine's memory divided among `size` processes, but at least 2 GiB each; CPU time unlimited."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limits(memory_bytes=max(_LEAST_MEMORY_BYTES, total // 2 // size))


SHARED: Final = SharedPools()
