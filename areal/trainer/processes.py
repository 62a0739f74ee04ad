"""The processes of a run: one engine server and the rollout workers. Starts them, watches them, ends them.

A process that ends when it should not is told to `on_death` at once, in one sentence. In `rollout.in_process` mode the
worker is an object on the driver's own event loop instead.
"""

import asyncio
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from areal.api.errors import ProcessDied
from areal.api.messages import GroupResult, GroupTask
from areal.config.rollout import RolloutConfig
from areal.engine.remote import RemoteEngine
from areal.infra.api_wire import api_wire
from areal.infra.channel import Channel
from areal.infra.dial_home import Home
from areal.infra.scheduler import Command, Placement, make_scheduler
from areal.rollout.pipeline import Worker
from areal.rollout.worker import ROLE as WORKER_ROLE
from areal.rollout.worker import RolloutWorker, WorkerSetup

ENGINE_ROLE = "engine"
START_SECONDS = 120.0
SETUP_SECONDS = 300.0
"""A workflow's constructor may load much."""
ASK_SECONDS = 10.0


@dataclass
class RemoteWorker:
    """A rollout worker in another process."""

    channel: Channel

    async def run_group(self, task: GroupTask) -> GroupResult:
        result: GroupResult = await self.channel.call("run_group", task, timeout_seconds=None)
        return result


class Processes:
    def __init__(self, scheduler_type: str, logs: Path, on_death: Callable[[ProcessDied], None]) -> None:
        self._scheduler = make_scheduler(scheduler_type)
        self._logs = logs
        self._on_death = on_death
        self._home = Home(api_wire())
        self._channels: dict[str, Channel] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._local: RolloutWorker | None = None
        self._closing = False

    async def start(
        self, rollout: RolloutConfig, model: Path, setup: WorkerSetup, engine_threads: int
    ) -> tuple[RemoteEngine, list[Worker]]:
        """The engine and the workers, all at once; each worker is told the engine's address as soon as there is one."""
        await self._home.open()
        indices = range(0 if rollout.in_process else rollout.num_workers)
        (engine, address), channels = await asyncio.gather(
            self._start_engine(model, rollout.dtype, engine_threads),
            asyncio.gather(*(self._start_worker(index) for index in indices)),
        )
        setup = replace(setup, engine_address=address)
        if rollout.in_process:
            self._local = await RolloutWorker.start(setup)
            return engine, [self._local]
        packed = pickle.dumps(setup)
        await asyncio.gather(*(each.call("setup", packed, timeout_seconds=SETUP_SECONDS) for each in channels))
        return engine, [RemoteWorker(each) for each in channels]

    async def cpu_seconds(self) -> dict[str, float]:
        """Processor time of every process so far."""
        used = {"driver": time.process_time()}
        for name, channel in sorted(self._channels.items()):
            used[name] = await channel.call("cpu_seconds", timeout_seconds=ASK_SECONDS)
        return used

    async def close(self) -> None:
        self._closing = True
        for watcher in self._watchers:
            watcher.cancel()
        if self._local is not None:
            await self._local.aclose()
        await self._home.close()
        await self._scheduler.close()

    async def _start_engine(self, model: Path, dtype: str, threads: int) -> tuple[RemoteEngine, str]:
        """The driver's handle on the engine, and the address that workers reach it at."""
        env = {"OMP_NUM_THREADS": str(threads)}
        placement = await self._start(ENGINE_ROLE, ["areal.engine.server", str(model), dtype], env)
        arrival = await self._home.expect(ENGINE_ROLE, 0, placement, timeout_seconds=START_SECONDS)
        self._watch(ENGINE_ROLE, placement, arrival.channel)
        return RemoteEngine(arrival.channel), arrival.info["address"]

    async def _start_worker(self, index: int) -> Channel:
        name = f"{WORKER_ROLE} {index}"
        # One thread: episodes wait for the engine, and what they compute themselves must not crowd it out.
        placement = await self._start(name, ["areal.rollout.worker", str(index)], {"OMP_NUM_THREADS": "1"})
        arrival = await self._home.expect(WORKER_ROLE, index, placement, timeout_seconds=START_SECONDS)
        self._watch(name, placement, arrival.channel)
        return arrival.channel

    async def _start(self, name: str, module: list[str], env: dict[str, str]) -> Placement:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        env = {"PYTHONPATH": path, **env, **self._home.env}
        log = self._logs / f"{name.replace(' ', '-')}.log"
        return await self._scheduler.start(Command(name, [sys.executable, "-m", *module], log, env))

    def _watch(self, name: str, placement: Placement, channel: Channel) -> None:
        self._channels[name] = channel
        self._watchers.append(asyncio.ensure_future(self._until_death(placement)))

    async def _until_death(self, placement: Placement) -> None:
        await placement.wait()
        if not self._closing:
            self._on_death(ProcessDied(placement.describe_exit()))
