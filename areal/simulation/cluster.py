"""The simulated half of a run: engines, rollout workers that play traced episodes on them, and a trainer."""

import asyncio
import random

import numpy as np

from areal.api.messages import Episode, GroupResult, GroupTask, Row
from areal.simulation.servers import Machine, Server
from areal.simulation.trace import Trace, Turn


class Cluster:
    """Made on the loop that it lives on. `cores` = one machine whose cores everything shares; None = enough for all."""

    def __init__(self, trace: Trace, *, engines: int, workers: int, trainers: int, cores: float | None = None) -> None:
        machine = None if cores is None else Machine(cores)
        speed = trace.engine
        self.trace = trace
        self.version = 0
        self.engines = [
            Server(1 / speed.alone_tokens_per_second, 1 / speed.full_tokens_per_second, machine) for _ in range(engines)
        ]
        self.workers = [SimulatedWorker(self, Server(0.0, 1.0, machine), number) for number in range(workers)]
        self.trainer = Server(0.0, 1.0, machine)
        self._trainers = trainers

    async def train(self, tokens: int) -> None:
        """One step."""
        speed = self.trace.trainer
        await self.trainer.serve(speed.step_seconds + tokens / (speed.tokens_per_second * self._trainers))

    async def swap(self, version: int) -> None:
        """New weights, on every engine at once; requests that are running go on under them."""
        await asyncio.gather(*(engine.hold(self.trace.engine.swap_seconds) for engine in self.engines))
        self.version = version

    def least_loaded_engine(self) -> Server:
        return min(self.engines, key=lambda engine: engine.jobs)


class SimulatedWorker:
    """Plays the part of a rollout worker towards the real pipeline."""

    def __init__(self, cluster: Cluster, process: Server, number: int) -> None:
        self._cluster = cluster
        self._process = process
        self._draw = random.Random(number)

    async def run_group(self, task: GroupTask) -> GroupResult:
        episodes = self._cluster.trace.episodes
        chosen = [self._draw.choice(episodes) for _ in range(task.n_samples)]
        rows = await asyncio.gather(*map(self._play, chosen))
        return GroupResult(task.task_id, [Episode([row], 0.0, calls=len(row.versions)) for row in rows], [], {})

    async def _play(self, turns: list[Turn]) -> Row:
        versions = []
        for turn in turns:
            await asyncio.sleep(turn.wait_seconds)
            await self._process.serve(self._cluster.trace.client.call_seconds)
            versions.append(self._cluster.version)
            await self._cluster.least_loaded_engine().serve(turn.tokens)
        return _row(versions, sum(turn.tokens for turn in turns))


def _row(versions: list[int], tokens: float) -> Row:
    """An entry per turn; the number of tokens travels as the reward, which nobody else needs here."""
    count = len(versions)
    zeros = np.zeros(count, np.float32)
    return Row(
        input_ids=np.zeros(count, np.int32),
        loss_mask=np.ones(count, np.bool_),
        logprobs=zeros,
        versions=np.array(versions, np.int32),
        returns=zeros,
        completion_index=np.zeros(count, np.int32),
        temperatures=zeros,
        reward=tokens,
    )
