"""The rollout workers of a run, as the driver sees them."""

import asyncio
import pickle
from dataclasses import replace

from areal.api.errors import GroupLost
from areal.api.messages import WORKER_ROLE, EngineAddress, GroupResult, GroupTask, WorkerSetup
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.scheduler import Ask, Placement
from areal.rollout.dispatch import GroupWorker
from areal.trainer.engines import Engines
from areal.trainer.processes import Processes
from areal.utils import waits

START_SECONDS = 120.0
ASK_SECONDS = 30.0
SETUP_SECONDS = 300.0
"""A workflow's constructor may load a lot."""


def worker_ask(index: int) -> Ask:
    return Ask(f"{WORKER_ROLE} {index}")


class RemoteWorker(GroupWorker):
    """A rollout worker in another process, and in the one that replaces it; a `ProcessPlace` of the run."""

    role = WORKER_ROLE

    def __init__(self, index: int, setup: WorkerSetup, engines: Engines, processes: Processes) -> None:
        self._index = index
        self.ask: Ask | None = worker_ask(index)
        self._setup = setup
        self._engines = engines
        self._processes = processes
        self._channel: Channel | None = None
        self._connected = asyncio.Event()
        """Set at the next connection."""

    async def start(self) -> Placement:
        # One thread: episodes wait for the engine, and what they compute themselves must not crowd it out.
        env = {"OMP_NUM_THREADS": "1"}
        return await self._processes.spawn(self.name, ["areal.rollout.worker", str(self._index)], env)

    async def join(self, placement: Placement) -> None:
        arrival = await self._processes.expect(
            WORKER_ROLE,
            self._index,
            placement,
            timeout_seconds=START_SECONDS,
            handlers={"engine_lost": self._engines.lost},
        )
        await self._engines.group.until_serving()
        setup = replace(self._setup, engines=self._engines.serving)
        with waits.current().entered("constructs the workflow", SETUP_SECONDS):
            await arrival.channel.call("setup", pickle.dumps(setup), timeout_seconds=SETUP_SECONDS)
        self._processes.count_cpu(self.name, arrival.channel)
        self._channel = arrival.channel
        self.follow(self._engines.serving)  # others than in its setup may serve by now
        self._connected.set()
        self._connected = asyncio.Event()

    def leave(self) -> None:
        return  # its channel has closed, so it is not present any more

    def retire(self) -> bool:
        return False

    def follow(self, engines: list[EngineAddress]) -> None:
        """Tell it which engines serve; one that is being started will be told."""
        if self._channel is not None and self._channel.is_open:
            self._channel.notify("follow", engines)

    @property
    def present(self) -> bool:
        return self._channel is not None and self._channel.is_open

    async def until_present(self) -> None:
        while not self.present:
            await self._connected.wait()

    async def run_group(self, task: GroupTask) -> GroupResult:
        assert self._channel is not None, "until_present() comes first"
        try:
            result: GroupResult = await self._channel.call("run_group", task, timeout_seconds=None)
        except ChannelClosed as error:
            raise GroupLost(str(error)) from None
        return result

    async def unasked_groups(self) -> list[int]:
        assert self._channel is not None, "until_present() comes first"
        try:
            found: list[int] = await self._channel.call("unasked_groups", timeout_seconds=ASK_SECONDS)
        except (ChannelClosed, TimeoutError):
            return []  # it is being started again, or its event loop is blocked: its groups count as they did
        return found

    @property
    def name(self) -> str:
        return f"{WORKER_ROLE} {self._index}"
