"""The engines of a run, as the driver sees them: in which state each is, and which weights it must have.

Every engine gets the weights that are published, at the same time; one that fails to take them in time is ended and
replaced, and the run goes on with the others. One that is new gets the weights of the day before requests reach it. The
rollout workers are told of every change, and send requests to those that serve and to no others.

An engine that says it has the weights and computes with others (`WrongWeights`) ends the run, before anything that it
drew with them is trained on.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, EngineError, EngineGone, WeightMismatch, WrongWeights
from areal.api.messages import ENGINE_ROLE, EngineAddress
from areal.config.backend import VLLM_RANKS, Backend
from areal.config.rollout import RolloutConfig
from areal.config.training import LoraConfig
from areal.engine.inference.group import EngineGroup
from areal.engine.inference.remote import GENERATE_ROLE, RemoteEngine
from areal.engine.model.device import find_device
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import connect
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Ask, Placement
from areal.infra.scheduler.local import gpus_here
from areal.trainer.processes import Processes, ask
from areal.utils.logging import getLogger

START_SECONDS = {"embedded": 120.0}
OTHERS_START_SECONDS = 900.0
"""The large engines compile before they serve."""
END_SECONDS = 1.0
"""How long an engine that does not work any more may take to end."""
logger = getLogger("fleet")


class EngineState(StrEnum):
    STARTING = "starting"
    """It has not connected yet."""
    CATCHING_UP = "catching up"
    """It is given the weights of the day."""
    SERVING = "serving"
    """It has the published weights, and requests are sent to it."""
    SUSPECT = "suspect"
    """It hung up, or did not answer in time. It gets no more requests and is being ended."""
    DEAD = "dead"
    """It has ended, and will be started again if the budget allows."""
    RETIRED = "retired"
    """It will not be started again."""


NEXT_STATES: dict[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset({EngineState.CATCHING_UP, EngineState.SUSPECT, EngineState.DEAD}),
    EngineState.CATCHING_UP: frozenset({EngineState.SERVING, EngineState.SUSPECT, EngineState.DEAD}),
    EngineState.SERVING: frozenset({EngineState.SUSPECT, EngineState.DEAD}),
    EngineState.SUSPECT: frozenset({EngineState.DEAD}),
    EngineState.DEAD: frozenset({EngineState.STARTING, EngineState.RETIRED}),
    EngineState.RETIRED: frozenset(),
}


class Engines:
    """All of them together."""

    def __init__(self, on_change: Callable[[list[EngineAddress]], None]) -> None:
        """`on_change` gets those that serve, whenever that changes."""
        self.members: list[EngineMember] = []
        self.group = EngineGroup(on_lost=self._suspect)
        """Those that serve, over the connections that they opened to the driver: for control, not for requests."""
        self._on_change = on_change
        self._weights: WeightUpdate | None = None
        """What an engine must have before it serves; None = those of its model's files."""
        self.published = 0
        """Versions that all engines have been given."""
        self.staging_seconds = 0.0
        """Of all of them: until the engines had checked the new weights, while they generated."""
        self.swapping_seconds = 0.0
        """Until they used them."""
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self.state_entered = asyncio.Event()
        """Set when a member enters a state."""

    @classmethod
    def of(
        cls,
        rollout: RolloutConfig,
        model: Path,
        processes: Processes,
        on_change: Callable[[list[EngineAddress]], None],
        *,
        threads: int,
    ) -> "Engines":
        """The engines that the config asks for, not started yet; `threads` are shared out among them."""
        engines, backend = cls(on_change), Backend.parse(rollout.backend)
        urls = rollout.server_urls
        if rollout.addresses and not urls:
            secret = rollout.engine_secret
            doors: list[EngineDoor] = [_RunningServer(each, secret, processes) for each in rollout.addresses]
        else:
            count = len(urls) or backend.servers
            env = {"OMP_NUM_THREADS": str(max(1, threads // count))}
            doors = [_OwnServer(index, backend, rollout, model, processes, env) for index in range(count)]
        engines.members = [EngineMember(engines, door) for door in doors]
        return engines

    @property
    def serving(self) -> list[EngineAddress]:
        return [each.address for each in self.members if each.state is EngineState.SERVING and each.address is not None]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()`, which is looked at whenever a member enters a state."""
        while not condition():
            self.state_entered.clear()
            await self.state_entered.wait()

    async def publish(self, update: WeightUpdate) -> None:
        """Give all of them new weights; waits for an engine if there is none."""
        self._weights = update
        began = time.monotonic()
        await self.group.stage_weights(update)
        staged = time.monotonic()
        await self.group.update_weights(update)
        self.published += 1
        self.staging_seconds += staged - began
        self.swapping_seconds += time.monotonic() - staged

    async def activity(self) -> list[tuple[float, float]]:
        """When any engine was generating, as (start, end), in order and without overlaps."""
        return _merged([interval for each in await self.group.each("activity") for interval in each])

    async def pauses(self) -> list[float]:
        """For how long each version held up generation, of every engine."""
        return [pause for each in await self.group.each("pauses") for pause in each]

    async def swaps(self) -> list[float]:
        """For how long nothing at all was computed meanwhile."""
        return [swap for each in await self.group.each("swaps") for swap in each]

    async def catch_up(self, engine: RemoteEngine) -> None:
        """Give an engine the weights that were published last, also if that changes meanwhile."""
        taken = None
        while self._weights is not None and taken is not self._weights:
            taken = self._weights
            try:
                await engine.stage_weights(taken)
                await engine.update_weights(taken)
            except WeightMismatch:
                if taken is self._weights:  # otherwise their file holds newer ones by now
                    raise

    def changed(self) -> None:
        self._on_change(self.serving)

    def give_up(self) -> None:
        """The run has failed: whoever waits for an engine gets an error."""
        self.group.give_up("the engine is gone")

    async def close(self) -> None:
        """What ends from now on is not a failure, and nobody is told."""
        self._closed = True
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        self.give_up()

    def lost(self, address: EngineAddress) -> None:
        """A rollout worker cannot reach this engine any more."""
        member = next((each for each in self.members if each.address == address), None)
        if member is not None:
            self.end(member, EngineError("a rollout worker cannot reach it"))

    def _suspect(self, name: str, error: BaseException) -> None:
        member = next((each for each in self.members if each.key == name), None)
        if member is not None:
            self.end(member, error)

    def end(self, member: "EngineMember", why: BaseException) -> None:
        """An engine does not do what it should: it gets no more requests, and is ended and replaced."""
        if self._closed or member.state is not EngineState.SERVING:
            return
        if not isinstance(why, EngineGone):  # what it died of is said when that is known
            logger.warning("%s is ended: %s", member.name, why)
        member.enter(EngineState.SUSPECT)
        self.group.remove(member.key)
        self.changed()
        ending = asyncio.ensure_future(member.stop())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class EngineMember:
    """One engine, and the one that replaces it; a `ProcessPlace` of the run."""

    role = ENGINE_ROLE

    def __init__(self, engines: Engines, door: "EngineDoor") -> None:
        self.name = door.name
        self.ask = door.ask
        self.state = EngineState.DEAD
        self.address: EngineAddress | None = None
        """Of the present process, once it has connected."""
        self._starts = 0
        self._engines = engines
        self._door = door
        self.placement: Placement | None = None
        """Of the present process."""

    @property
    def key(self) -> str:
        """What the group calls the present process."""
        return f"{self.name} #{self._starts}"

    def enter(self, state: EngineState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.name} cannot be {state} after it was {self.state}"
        self.state = state
        self._engines.state_entered.set()

    async def start(self) -> Placement:
        self.enter(EngineState.STARTING)
        self._starts += 1
        try:
            self.placement = await self._door.start()
        except BaseException:
            self.enter(EngineState.DEAD)
            raise
        return self.placement

    async def join(self, placement: Placement) -> None:
        """Wait for the engine, give it the weights of the day, and only then let requests reach it."""
        try:
            channel, address = await self._door.connected(placement)
            self.enter(EngineState.CATCHING_UP)
            engine = RemoteEngine(channel)
            await self._engines.catch_up(engine)
        except WrongWeights as error:  # a failure of the run, not of this process, which is not replaced
            raise WrongWeights(f"{self.key}: {error}") from None
        except (ArealError, TimeoutError) as error:
            if placement.returncode is None:
                logger.warning("%s is ended before it served: %s", self.name, error)
                self.enter(EngineState.SUSPECT)
                await placement.stop(END_SECONDS)
            raise
        self.address = EngineAddress(self.name, self._starts, address, self._door.secret)
        self.enter(EngineState.SERVING)
        key = self.key
        self._engines.group.add(key, engine)
        self._engines.changed()
        channel.closed.add_done_callback(lambda _: self._hung_up(key))

    def leave(self) -> None:
        served = self.state is EngineState.SERVING
        self._engines.group.remove(self.key)
        if self.state is not EngineState.DEAD:
            self.enter(EngineState.DEAD)
        if served:
            self._engines.changed()

    def retire(self) -> bool:
        self.enter(EngineState.RETIRED)
        return any(each.state is not EngineState.RETIRED for each in self._engines.members)

    async def stop(self) -> None:
        assert self.placement is not None
        await self.placement.stop(END_SECONDS)

    def _hung_up(self, key: str) -> None:
        if key == self.key:
            self._engines.end(self, EngineGone(f"{self.name} hung up"))


def engine_asks(rollout: RolloutConfig) -> list[Ask]:
    """What each server that the run starts needs of its host: several on cuda would all take its first GPU."""
    backend, urls = Backend.parse(rollout.backend), rollout.server_urls
    if rollout.addresses and not urls:
        return []
    count = len(urls) or backend.servers
    own = backend.gpus_each > 1 or (backend.servers > 1 and rollout.device == "cuda")
    gpus = backend.gpus_each if rollout.gpus is None and own else rollout.gpus
    names = [ENGINE_ROLE] if count == 1 else [f"{ENGINE_ROLE} {index}" for index in range(count)]
    return [ask(name, rollout, 0 if urls else gpus) for name in names]  # a server that runs already has its GPUs


def on_this_machine(rollout: RolloutConfig) -> RolloutConfig:
    """The same for engines that this machine runs. Where there are several and `auto` means its GPUs, it is `cuda`, so
    that each is given one of its own. Raises ConfigError for a device that this machine does not have."""
    backend, device = Backend.parse(rollout.backend), find_device(rollout.device, "rollout.device")
    has_gpus = device.type == "cuda" if backend.kind == "embedded" else bool(gpus_here(os.environ))
    several = backend.servers > 1 and not rollout.addresses
    return replace(rollout, device="cuda") if several and rollout.device == "auto" and has_gpus else rollout


def with_adapters(rollout: RolloutConfig, lora: LoraConfig) -> RolloutConfig:
    """The same for engines that are given adapters: vLLM must be told before it starts."""
    if lora.rank is None or Backend.parse(rollout.backend).kind != "vllm":
        return rollout
    rank = next(each for each in VLLM_RANKS if each >= lora.rank)
    return replace(rollout, engine_args=["--enable-lora", "--max-lora-rank", str(rank), *rollout.engine_args])


class EngineDoor(Protocol):
    """How an engine comes about."""

    name: str
    secret: bytes | None
    """What opens it to rollout workers; None = it follows from the run's."""
    ask: Ask | None
    """What it needs of a host; None = it has one."""

    async def start(self) -> Placement: ...

    async def connected(self, placement: Placement) -> tuple[Channel, str]:
        """A channel to control it, and the address at which workers reach it."""
        ...


class _OwnServer:
    """A server that the run starts; it connects to the driver."""

    secret: bytes | None = None

    def __init__(
        self,
        index: int,
        backend: Backend,
        rollout: RolloutConfig,
        model: Path,
        processes: Processes,
        env: dict[str, str],
    ) -> None:
        self.ask: Ask | None = engine_asks(rollout)[index]
        self.name = self.ask.name
        self._index = index
        self._processes = processes
        self._env = env
        self._start_seconds = START_SECONDS.get(backend.kind, OTHERS_START_SECONDS)
        options: dict[str, Any] = {
            "--backend": backend.kind,
            "--gpus": backend.gpus_each,
            "--dtype": rollout.dtype,
            "--device": rollout.device,
            "--kernel": rollout.kernel,
            "--index": index,
        }
        words = [str(word) for option in options.items() for word in option]
        if rollout.server_urls:
            words.append(f"--url={rollout.server_urls[index]}")
        words += [f"--python={rollout.python}", *(f"--engine-arg={each}" for each in rollout.engine_args)]
        self._module = ["areal.engine.inference.server", str(model), *words]

    async def start(self) -> Placement:
        return await self._processes.spawn(self.name, self._module, self._env)

    async def connected(self, placement: Placement) -> tuple[Channel, str]:
        arrival = await self._processes.expect(ENGINE_ROLE, self._index, placement, timeout_seconds=self._start_seconds)
        self._processes.count_cpu(self.name, arrival.channel)
        return arrival.channel, arrival.info["address"]


class _RunningServer:
    """A server that runs already; the driver connects to it. Its process is not ours: only the connection can end."""

    ask: Ask | None = None

    def __init__(self, address: str, secret: bytes, processes: Processes) -> None:
        self.name = f"the engine at {address}"
        self.secret: bytes | None = role_secret(secret, GENERATE_ROLE)
        self._connect = partial(connect, address, wire=api_wire(), peer=self.name, secret=secret)
        self._address = address
        self._processes = processes

    async def start(self) -> Placement:
        channel = await self._connect()
        self._processes.count_cpu(self.name, channel)
        return _Connection(self.name, channel)

    async def connected(self, placement: Placement) -> tuple[Channel, str]:
        assert isinstance(placement, _Connection)
        return placement.channel, self._address


class _Connection:
    """A `Placement` of which only the connection is known."""

    pid = 0
    host = ""
    log_path = Path()
    silence: tuple[float, float] | None = None

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.address = name
        self.channel = channel

    @property
    def returncode(self) -> int | None:
        return None if self.channel.is_open else 0

    async def wait(self) -> int:
        await self.channel.closed
        return 0

    def describe_exit(self) -> str:
        return f"{self.name} has hung up"

    async def stop(self, grace_seconds: float = 5.0) -> None:
        with suppress(ConnectionError):
            await self.channel.close()


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
