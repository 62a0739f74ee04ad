"""The processes of a run: started, joined, kept running and ended.

A `ProcessPlace` is what a process is needed for: an engine, a rollout worker. Whatever fills it may end at any moment.
It is then filled again, within the budget of its role. A place that cannot be filled any more is retired if the run can
do without it, else the run fails.

Invariant: when a death ends the run, it fails with what died, not with the broken connection that it caused.
"""

import asyncio
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from areal.api.errors import ArealError, EngineError, ProcessDied, RanksLost
from areal.api.messages import RANK_ROLE, WORKER_ROLE, Doing
from areal.config.resources import Resources
from areal.config.training import SchedulerConfig
from areal.engine.model.published import shared_memory
from areal.infra.rpc.channel import Channel, ChannelClosed, Handler
from areal.infra.rpc.connect import ConnectedProcess, DriverListener
from areal.infra.rpc.shipping import SCRATCH_VARIABLE, SHARED_VARIABLE
from areal.infra.rpc.status import ProcessStatus
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Ask, Command, Placement, make_scheduler
from areal.infra.status import doing_of
from areal.utils import waits
from areal.utils.logging import getLogger
from areal.utils.waits import Waits

ASK_SECONDS = 10.0
CAUSE_SECONDS = 2.0
"""A broken connection is noticed before the death that broke it; how long to wait for the better explanation."""
HOUR_SECONDS = 3600.0
OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Is told what happened, and its details. It does not wait for anything."""
logger = getLogger("fleet")


def ask(name: str, resources: Resources, gpus: int | None) -> Ask:
    """What the settings of a role say that a process of it needs."""
    return Ask(name, resources.cpus, gpus, round(resources.memory_gib * 1024))


class ProcessPlace(Protocol):
    @property
    def name(self) -> str:
        """What people call its process: `rollout worker 0`."""
        ...

    role: str
    """Whose restarts count together."""
    ask: Ask | None
    """What its process needs of a host; None = it is not started here."""

    async def start(self) -> Placement: ...

    async def join(self, placement: Placement) -> None:
        """Wait until the process is there and let it work. A failure with the process still there fails the run."""
        ...

    def leave(self) -> None:
        """The process has ended."""
        ...

    def retire(self) -> bool:
        """It will not be started again; returns whether the run can go on without it."""
        ...


@dataclass
class _Filling:
    """How a place is filled now."""

    role: str
    waits: Waits = field(default_factory=Waits)
    """What its process is waited for with."""
    placement: Placement | None = None


class Processes:
    """What fills the places of a run, until `close`."""

    def __init__(
        self,
        config: SchedulerConfig,
        logs: Path,
        on_failure: Callable[[Exception], None],
        handlers: Mapping[str, Handler] | None = None,
        on_event: OnEvent = lambda kind, detail: None,
    ) -> None:
        """`on_failure` gets the reason why the run cannot go on, on the event loop; processes may call `handlers`.

        `on_event` is told of deaths and restarts.
        """
        self._config = config
        self._scheduler = make_scheduler(config)
        self._logs = logs
        self._on_failure = on_failure
        self._on_event = on_event
        self._listener = DriverListener(api_wire(), handlers)
        self.status = ProcessStatus()
        self._filling: dict[str, _Filling] = {}
        """By the name of the process."""
        self.shared_memory = self._scheduler.scratch(shared_memory())
        """A directory for the weights that engines map."""
        self._shared = _new_directory()
        """What its processes have together, on each host."""
        self._reserved = False
        self._asks: dict[str, Ask] = {}
        """By the name of the process."""
        self._budgets: dict[str, RestartBudget] = {}
        self.deaths: Counter[str] = Counter()
        """By role: processes that ended although nobody had asked them to."""
        self.restarts: Counter[str] = Counter()
        self._keeping: list[asyncio.Task[None]] = []
        self._channels: dict[str, Channel] = {}
        self._cpu_seconds: dict[str, float] = {}
        """By process, as far as it is known."""
        self._started_with: dict[str, float] = {}
        """What was used before the present process of that name."""

    @property
    def secret(self) -> bytes:
        """The run's, which its processes prove to know to each other."""
        return self._listener.secret

    @property
    def host(self) -> str:
        """The address of this machine where its processes reach the driver; valid after `reserve`."""
        return self._scheduler.host

    async def reserve(self, asks: Sequence[Ask]) -> None:
        """Places for all of them, or for none. Without this, `start` reserves those of the places that it fills."""
        seconds = self._config.place_seconds
        with waits.current().entered(f"waits for places for {len(asks)} processes", seconds, "scheduler.place_seconds"):
            await self._scheduler.reserve(asks, seconds)
        await self._listener.open(f"tcp:{self._scheduler.host}:0")
        await self.status.open(self._scheduler.host, self._listener.secret)
        self._asks = {ask.name: ask for ask in asks}
        self._reserved = True

    async def start(
        self, places: Sequence[ProcessPlace], never_again: Sequence[str] = (), set_aside: Sequence[Ask] = ()
    ) -> None:
        """Fill all places at once, and keep them filled; those of the roles `never_again` only once.

        `set_aside` is for others: the trainer, which runs in the driver.
        """
        for place in places:
            limit = 0 if place.role in never_again else self._config.max_restarts
            self._budgets.setdefault(place.role, RestartBudget(limit))
        if not self._reserved:
            await self.reserve([*set_aside, *(place.ask for place in places if place.ask is not None)])
        with waits.current().entered(f"starts {len(places)} processes"):
            placements = await asyncio.gather(*(self._fill(place) for place in places))
        for place, placement in zip(places, placements, strict=True):
            keeping = asyncio.ensure_future(self._keep(place, placement))
            keeping.add_done_callback(self._fail_with)
            self._keeping.append(keeping)

    async def spawn(self, name: str, module: Sequence[str], env: dict[str, str]) -> Placement:
        """Start `python -m …`, which connects to the driver and is then `expect`ed."""
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        scratch = _new_directory()
        env = {
            "PYTHONPATH": path,
            SCRATCH_VARIABLE: scratch,
            SHARED_VARIABLE: self._shared,
            **env,
            **self._listener.env,
            **self.status.env(name),
        }
        log = self._logs / f"{name.replace(' ', '-')}.log"
        argv = [sys.executable, "-m", *module]
        ask, secret = self._asks.get(name), self._listener.secret
        command = Command(name, argv, log, env, self._config.heartbeat_seconds, secret, ask, (scratch,), self._shared)
        return await self._scheduler.start(command)

    async def expect(
        self,
        role: str,
        index: int,
        placement: Placement,
        *,
        timeout_seconds: float,
        handlers: Mapping[str, Handler] | None = None,
    ) -> ConnectedProcess:
        """The process that was spawned, once it has connected; it may call `handlers`. Raises ProcessDied."""
        return await self._listener.expect(role, index, placement, timeout_seconds=timeout_seconds, handlers=handlers)

    def count_cpu(self, name: str, channel: Channel) -> None:
        """The process at the other end counts in `cpu_seconds` from now on."""
        self._channels[name] = channel
        self._started_with[name] = self._cpu_seconds.setdefault(name, 0.0)

    async def cpu_seconds(self, timeout_seconds: float = ASK_SECONDS) -> dict[str, float]:
        """What a process used before it died, or before it stopped to answer, is known as of the last call."""

        async def ask(name: str, channel: Channel) -> None:
            since = self._started_with[name]
            with suppress(ChannelClosed, TimeoutError):
                self._cpu_seconds[name] = since + await channel.call("cpu_seconds", timeout_seconds=timeout_seconds)

        await asyncio.gather(*(ask(name, channel) for name, channel in self._channels.items()))
        return {"driver": time.process_time(), **self._cpu_seconds}

    def doings(self) -> dict[str, Doing]:
        """What the driver knows of each process, by its name. Call it on the event loop."""
        return {name: self._doing(name, filling) for name, filling in self._filling.items()}

    def _doing(self, name: str, filling: _Filling) -> Doing:
        placement = filling.placement
        if (starting := doing_of(name, filling.waits)) is not None:
            used = self._budgets[filling.role].describe()
            return replace(starting, what=f"is being started{f' again ({used})' if used else ''}: it {starting.what}")
        if placement is None or placement.returncode is not None:
            return Doing(name, "has ended" if placement is None else f"has ended: {placement.describe_exit()}")
        if placement.silence is not None:
            silent, left = placement.silence
            what = "is frozen: it shows no sign of life, and is killed and started again"
            return Doing(name, what, silent, left, f"scheduler.heartbeat_seconds={self._config.heartbeat_seconds:g}")
        return Doing(name, "runs")

    async def close(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._listener.close()
        await self._scheduler.close()
        await asyncio.to_thread(self.status.close)

    async def _fill(self, place: ProcessPlace) -> Placement:
        """Start a place's first process. One that is killed meanwhile is started again; one that gives up is not."""
        filling = self._filling[place.name] = _Filling(place.role)
        while True:
            placement = None
            try:
                with waits.of(filling.waits):
                    placement = filling.placement = await place.start()
                    await _join(place, placement)
            except ProcessDied as died:
                self._note_death(place, str(died))
                if placement is not None:  # otherwise it was its keeper that died
                    place.leave()
                    if (placement.returncode or 0) >= 0:
                        raise
                if not self._may_restart(place):
                    raise _lost(place, str(died)) from None
                logger.warning("%s; it is started again", died)
            else:
                return placement

    async def _keep(self, place: ProcessPlace, placement: Placement) -> None:
        """Fill the place again whenever its process has ended, as often as the budget of its role allows."""
        died, filling = "", self._filling[place.name]
        while True:
            if not died:
                await placement.wait()
                died = placement.describe_exit()
                self._note_death(place, died)
                place.leave()
            if not self._may_restart(place):
                self._end(place, died, placement)
                return
            logger.warning("%s; it is started again, and what it was doing is done again", died)
            try:
                with waits.of(filling.waits):
                    placement = filling.placement = await place.start()
            except (ArealError, OSError) as error:
                died = f"it cannot be started again: {error}"
                continue
            died = ""
            try:
                with waits.of(filling.waits):
                    await _join(place, placement)
            except Exception as error:
                if placement.returncode is None:
                    self._on_failure(error)
                    return

    def _may_restart(self, place: ProcessPlace) -> bool:
        """Whether the budget of its role allows one more; it then counts."""
        allowed = self._budgets[place.role].spend()
        self.restarts[place.role] += allowed
        if allowed:
            self._on_event("restart", {"role": place.role, "name": place.name})
        return allowed

    def _note_death(self, place: ProcessPlace, why: str) -> None:
        self.deaths[place.role] += 1
        self._on_event("death", {"role": place.role, "name": place.name, "why": why})

    def _fail_with(self, keeping: "asyncio.Task[None]") -> None:
        """A place that nobody keeps filled would be waited for without end."""
        error = None if keeping.cancelled() else keeping.exception()
        if isinstance(error, Exception):
            self._on_failure(error)

    def _end(self, place: ProcessPlace, died: str, placement: Placement) -> None:
        limit = self._budgets[place.role].limit
        why = f"; {limit} restarts within an hour are as many as scheduler.max_restarts allows" if limit else ""
        if place.retire():
            logger.warning("%s%s; the run goes on without it", died, why)
            return
        if place.role == WORKER_ROLE and (placement.returncode or 0) > 0:
            why += "; an inline agent that ends its process does this, rollout.agent.mode=subproc keeps it apart"
        self._on_failure(_lost(place, died + why))


def _lost(place: ProcessPlace, why: str) -> ProcessDied:
    """A rank that is killed takes all of them along, and the run starts them together again."""
    return RanksLost(why) if place.role == RANK_ROLE else ProcessDied(why)


def _new_directory() -> str:
    """A name that no other directory has."""
    return str(shared_memory() / f"areal-{secrets.token_hex(8)}")


async def _join(place: ProcessPlace, placement: Placement) -> None:
    """Raises ProcessDied if the process ended meanwhile, not the broken connection that its death caused."""
    try:
        await place.join(placement)
    except (ChannelClosed, EngineError):
        with suppress(TimeoutError):
            await asyncio.wait_for(placement.wait(), CAUSE_SECONDS)
        if placement.returncode is None:
            raise
        raise ProcessDied(placement.describe_exit()) from None


class RestartBudget:
    """At most `limit` restarts within an hour."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._spent: list[float] = []

    def describe(self) -> str:
        """How much of it is used; empty if nothing is."""
        spent = sum(self._clock() - each < HOUR_SECONDS for each in self._spent)
        return f"{spent} of {self.limit} restarts within an hour are used" if spent else ""

    def spend(self) -> bool:
        """Whether one more is allowed; it then counts."""
        now = self._clock()
        self._spent = [each for each in self._spent if now - each < HOUR_SECONDS]
        if len(self._spent) >= self.limit:
            return False
        self._spent.append(now)
        return True
