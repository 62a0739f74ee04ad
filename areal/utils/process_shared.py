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
        self._pools: dict[tuple[int, int | None, Limits | None], ProcessPool] = {}

    def get(self, size: int | None = None, limits: Limits | None = None) -> ProcessPool:
        """The pool of this size (default: one process per usable core) and these limits (default: a fair share)."""
        # A fork inherits this object but none of the threads behind its pools, hence the process id.
        pid = os.getpid()
        with self._lock:
            pool = self._pools.get((pid, size, limits))
            if pool is None:
                number = size or usable_cores()
                full = (pid, number, limits or fair_limits(number))
                pool = self._pools.get(full) or ProcessPool(*full[1:])
                self._pools[full] = self._pools[pid, size, limits] = pool
            return pool


def fair_limits(size: int) -> Limits:
    """Half of the machine's memory divided among `size` processes, but at least 2 GiB each; CPU time unlimited."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limits(memory_bytes=max(_LEAST_MEMORY_BYTES, total // 2 // size))


SHARED: Final = SharedPools()
