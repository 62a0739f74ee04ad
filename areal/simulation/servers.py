"""Simulated servers: engines, worker processes and a trainer, and the machine whose cores they may share.

With c jobs at a server a unit of work takes `fixed + c * shared` seconds, so an engine is described by how fast a lone
request decodes (1 / fixed) and by how much it decodes in total when it is full (1 / shared). All jobs progress at the
same rate. Nothing is polled: a server schedules its next completion, and does so again when a job joins or its speed
changes.
"""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field


class SharedServer:
    def __init__(self, fixed: float, shared: float, machine: "Machine | None" = None) -> None:
        self._fixed, self._shared = fixed, shared
        self._machine = machine
        self._speed = 1.0
        self._held = 0
        self._done_each = 0.0
        """Units of work done for a job that has been here since the beginning."""
        self._since = self._now()
        self._order = itertools.count()
        self._heap: list[tuple[float, int, asyncio.Future[None]]] = []
        """Jobs: the value of `_done_each` at which each is done, in the order of arrival among equals."""
        self._timer: asyncio.TimerHandle | None = None
        self.busy_seconds = 0.0
        self.job_seconds = 0.0
        """Integral of the number of jobs over time."""
        if machine is not None:
            machine.servers.append(self)

    @property
    def jobs(self) -> int:
        return len(self._heap)

    async def serve(self, work: float) -> None:
        """Have `work` units done, alongside the other jobs."""
        if work <= 0:
            return
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, (self._done_each + work, next(self._order), done))
        self._changed()
        await done

    async def hold(self, seconds: float) -> None:
        """Stop all jobs for a while: a weight swap."""
        self._advance()
        self._held += 1
        self._schedule()
        await asyncio.sleep(seconds)
        self._advance()
        self._held -= 1
        self._schedule()

    def run_at(self, speed: float) -> None:
        self._advance()
        self._speed = speed
        self._schedule()

    def _rate(self) -> float:
        """Units per second that each job gets."""
        return 0.0 if self._held else self._speed / (self._fixed + self.jobs * self._shared)

    def _advance(self) -> None:
        """Account for the time since the last change."""
        now = self._now()
        passed, self._since = now - self._since, now
        if self._heap:
            self._done_each += passed * self._rate()
            self.busy_seconds += passed
            self.job_seconds += passed * self.jobs

    def _changed(self) -> None:
        if self._machine is not None:
            self._machine.rebalance()
        else:
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rate = self._rate() if self._heap else 0.0
        if rate:
            left = max(0.0, self._heap[0][0] - self._done_each)
            self._timer = asyncio.get_running_loop().call_later(left / rate, self._finish)

    def _finish(self) -> None:
        self._advance()
        _, _, done = heapq.heappop(self._heap)
        if not done.done():  # else its caller was cancelled
            done.set_result(None)
        self._changed()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass
class Machine:
    """Cores that servers share: with more busy servers than cores, each gets an equal part of them."""

    cores: float
    servers: list[SharedServer] = field(default_factory=list)

    @property
    def speed(self) -> float:
        busy = sum(server.jobs > 0 for server in self.servers)
        return min(1.0, self.cores / busy) if busy else 1.0

    def rebalance(self) -> None:
        speed = self.speed
        for server in self.servers:
            server.run_at(speed)
