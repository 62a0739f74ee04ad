"""Simulated servers: engines, worker processes and a trainer, and the machine whose cores they may share.

With c jobs at a server a unit of work takes `fixed + c * shared` seconds, so an engine is described by how fast a lone
request decodes (1 / fixed) and by how much it decodes in total when it is full (1 / shared). All jobs progress at the
same rate. Nothing is polled: a server schedules its next completion, and does so again when a job joins or its speed
changes. A server that is lost breaks its jobs off and says how much of each was left to do.
"""

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


class ServerLost(Exception):
    def __init__(self, undone: float) -> None:
        """`undone`: units of the job's work."""
        super().__init__(undone)
        self.undone = undone


class SharedServer:
    def __init__(self, fixed: float, shared: float, machine: "Machine | None" = None) -> None:
        self._fixed, self._shared = fixed, shared
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._speed = 1.0
        self._held = 0
        self._done_each = 0.0
        """Units of work done for a job that has been here since the beginning."""
        self._since = self._loop.time()
        self._order = itertools.count()
        self._heap: list[tuple[float, int, asyncio.Future[None], float]] = []
        """Jobs: the value of `_done_each` at which each is done, in the order of arrival among equals; its work."""
        self._timer: asyncio.TimerHandle | None = None
        self.busy_seconds = 0.0
        self._work_done = 0.0
        """Units, of all jobs."""
        self.job_seconds = 0.0
        """Integral of the number of jobs over time."""
        self.router: Router | None = None
        """Is told when the number of jobs changes."""
        if machine is not None:
            machine.servers.append(self)

    @property
    def jobs(self) -> int:
        return len(self._heap)

    @property
    def totals(self) -> tuple[float, float]:
        """Seconds with a job, and units of work done, until now."""
        if not self._heap:
            return self.busy_seconds, self._work_done
        passed = self._loop.time() - self._since
        return self.busy_seconds + passed, self._work_done + passed * self._rate() * self.jobs

    async def serve(self, work: float) -> None:
        """Have `work` units done, alongside the other jobs."""
        if work <= 0:
            return
        self._advance()
        done: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._heap, (self._done_each + work, next(self._order), done, work))
        self._changed()
        await done

    async def hold(self, seconds: float) -> None:
        """Stop all jobs for a while: a weight swap."""
        self._advance()
        self._held += 1
        self._schedule()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._advance()
            self._held -= 1
            self._schedule()

    def lose_jobs(self) -> float:
        """Break all of them off with ServerLost; the units that had been done for them."""
        self._advance()
        jobs, self._heap = self._heap, []
        done = 0.0
        for end, _, job, work in jobs:
            if not job.done():  # else its caller was cancelled
                undone = min(work, end - self._done_each)
                done += work - undone
                job.set_exception(ServerLost(undone))
        self._changed()
        return done

    def run_at(self, speed: float) -> None:
        self._advance()
        self._speed = speed
        self._schedule()

    def _rate(self) -> float:
        """Units per second that each job gets."""
        return 0.0 if self._held else self._speed / (self._fixed + self.jobs * self._shared)

    def _advance(self) -> None:
        """Account for the time since the last change."""
        now = self._loop.time()
        passed, self._since = now - self._since, now
        if self._heap:
            done = passed * self._rate()
            self._done_each += done
            self._work_done += done * self.jobs
            self.busy_seconds += passed
            self.job_seconds += passed * self.jobs

    def _changed(self) -> None:
        if self.router is not None:
            self.router.note(self)
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
            self._timer = self._loop.call_later(left / rate, self._finish)

    def _finish(self) -> None:
        self._advance()
        _, _, done, _ = heapq.heappop(self._heap)
        if not done.done():  # else its caller was cancelled
            done.set_result(None)
        self._changed()


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


class Router:
    """Finds the server with the fewest jobs among those that are up, the first of equals, without looking at all."""

    def __init__(self, servers: Sequence[SharedServer]) -> None:
        self._servers = list(servers)
        self._places = {server: place for place, server in enumerate(servers)}
        self._up = set(servers)
        self._heap = [(0, place) for place in range(len(servers))]
        """Every server that is up with its present number of jobs, and numbers that are not true any more."""
        self._changed = asyncio.Event()
        for server in servers:
            server.router = self

    @property
    def up(self) -> list[SharedServer]:
        return [server for server in self._servers if server in self._up]

    def note(self, server: SharedServer) -> None:
        if server in self._up:
            heapq.heappush(self._heap, (server.jobs, self._places[server]))

    def take_down(self, server: SharedServer) -> None:
        self._up.discard(server)

    def bring_up(self, server: SharedServer) -> None:
        self._up.add(server)
        self.note(server)
        self._changed.set()

    async def least_loaded(self) -> SharedServer:
        """Waits while none is up."""
        while not self._up:
            self._changed.clear()
            await self._changed.wait()
        while True:
            jobs, place = self._heap[0]
            server = self._servers[place]
            if server in self._up and server.jobs == jobs:
                return server
            heapq.heappop(self._heap)
