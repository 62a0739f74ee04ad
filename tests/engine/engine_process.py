"""A real engine server process, as the driver of a run starts it."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal.engine.inference.remote import RemoteEngine
from areal.infra.rpc.connect import ConnectedProcess, DriverListener, connect
from areal.infra.rpc.shipping import Shipper
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, LocalScheduler, Placement

START_SECONDS = 60.0


@dataclass
class EngineProcess:
    listener: DriverListener
    placement: Placement
    arrival: ConnectedProcess

    async def connect(self) -> RemoteEngine:
        """An engine over a connection of its own, as a rollout worker has it."""
        secret = self.listener.secret
        address = self.arrival.info["address"]
        return RemoteEngine(await connect(address, wire=api_wire(), peer="the engine", secret=secret))


@asynccontextmanager
async def engine_process(
    model: Path, log: Path, program: tuple[str, ...] = ("-m", "areal.engine.inference.server")
) -> AsyncIterator[EngineProcess]:
    scheduler, listener = LocalScheduler(), DriverListener(api_wire(), Shipper([model]).handlers)
    await listener.open()
    try:
        argv = [sys.executable, *program, str(model)]
        # One thread: a test's process shares the machine with the tests.
        env = listener.env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(path for path in sys.path if path)}
        placement = await scheduler.start(Command("engine", argv, log, env, secret=listener.secret))
        arrival = await listener.expect("engine", 0, placement, timeout_seconds=START_SECONDS)
        yield EngineProcess(listener, placement, arrival)
    finally:
        await listener.close()
        await scheduler.close()
