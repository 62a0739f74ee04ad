"""A real engine server process, as the driver of a run starts it."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal.api.engine_api import WeightUpdate
from areal.engine.inference.remote import GENERATE_ROLE, RemoteEngine
from areal.infra.rpc.channel import Channel
from areal.infra.rpc.connect import ConnectedProcess, DriverListener, connect
from areal.infra.rpc.frames import role_secret
from areal.infra.rpc.shipping import Shipper
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, LocalScheduler, Placement

START_SECONDS = 60.0


@dataclass
class EngineProcess:
    listener: DriverListener
    placement: Placement
    arrival: ConnectedProcess
    shipper: Shipper

    async def connect(self) -> "ControlledEngine":
        """An engine over a connection of its own, as a rollout worker has it, and with the driver's control of it."""
        secret = role_secret(self.listener.secret, GENERATE_ROLE)
        address = self.arrival.info["address"]
        worker = await connect(address, wire=api_wire(), peer="the engine", secret=secret)
        return ControlledEngine(worker, RemoteEngine(self.arrival.channel))


class ControlledEngine(RemoteEngine):
    """Generates over a worker's channel, and is controlled over the driver's."""

    def __init__(self, worker: Channel, driver: RemoteEngine) -> None:
        super().__init__(worker)
        self.driver = driver

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self.driver.stage_weights(update)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self.driver.update_weights(update)

    async def pause(self) -> None:
        await self.driver.pause()

    async def resume(self) -> None:
        await self.driver.resume()


@asynccontextmanager
async def engine_process(
    model: Path, log: Path, program: tuple[str, ...] = ("-m", "areal.engine.inference.server")
) -> AsyncIterator[EngineProcess]:
    shipper = Shipper([model])
    scheduler, listener = LocalScheduler(), DriverListener(api_wire(), shipper.handlers)
    await listener.open()
    try:
        argv = [sys.executable, *program, str(model)]
        # One thread: a test's process shares the machine with the tests.
        env = listener.env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(path for path in sys.path if path)}
        placement = await scheduler.start(Command("engine", argv, log, env, secret=listener.secret))
        arrival = await listener.expect("engine", 0, placement, timeout_seconds=START_SECONDS)
        yield EngineProcess(listener, placement, arrival, shipper)
    finally:
        await listener.close()
        await scheduler.close()
