"""The engines of a run on vLLM, as its driver has them, and as a worker of it reaches them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal.api.messages import EngineAddress
from areal.config.rollout import RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.inference.group import EngineConnections, EngineGroup
from areal.engine.inference.vllm import START_SECONDS
from areal.infra.rpc.shipping import Shipper
from areal.trainer.engines import Engines
from areal.trainer.processes import Processes


class RunOnVllm:
    def __init__(self, model: Path, logs: Path, scheduler: SchedulerConfig, **rollout: Any) -> None:
        self.failures: list[Exception] = []
        self.worker = EngineGroup()
        self.shipper = Shipper([model])
        self.processes = Processes(scheduler, logs, self.failures.append, self.shipper.handlers)
        self.connections = EngineConnections(self.worker, self.processes.secret)
        self.engines = Engines.of(RolloutConfig(**rollout), model, self.processes, self._changed, threads=1)
        self._following: set[asyncio.Task[None]] = set()

    def _changed(self, engines: Sequence[EngineAddress]) -> None:
        following = asyncio.ensure_future(self.connections.follow(engines))
        self._following.add(following)
        following.add_done_callback(self._following.discard)


@asynccontextmanager
async def running(
    model: Path, logs: Path, scheduler: SchedulerConfig | None = None, **rollout: Any
) -> AsyncIterator[RunOnVllm]:
    run = RunOnVllm(model, logs, scheduler or SchedulerConfig(), **rollout)
    try:
        async with asyncio.timeout(START_SECONDS):
            await run.processes.start(run.engines.members)
            await run.worker.until_serving()
        yield run
    finally:
        await run.worker.aclose()
        await run.engines.close()
        await run.processes.close()
