"""An event loop whose clock jumps to the next thing that happens instead of waiting for it.

Code that runs on it is unchanged: timers, time-outs and `asyncio.sleep` mean virtual seconds. It refuses to wait for
the outside world: when nothing is scheduled any more, nothing can happen, and that is an error.
"""

# MERGED-DOC
# The simulated half of a run: engines, rollout workers that play traced episodes on them, and a trainer.
# A run that is only imagined: the real pipeline between a simulated cluster and a simulated trainer.

import asyncio
import itertools
import random
import selectors
import sys
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from areal.api.messages import Episode, GroupResult, GroupTask, Row
from areal.rollout.admission import Admission
from areal.rollout.pipeline import Pipeline, TaskStream
from areal.simulation.servers import Machine, SharedServer
from areal.simulation.trace import Trace, Turn

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Never sleeps; the time it was asked to sleep has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the simulation waits for something that will never happen")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, from virtual second 0 on."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Cluster:
    """Made on the loop that it lives on. `cores` = one machine whose cores everything shares; None = enough for all."""

    def __init__(self, trace: Trace, *, engines: int, workers: int, trainers: int, cores: float | None = None) -> None:
        machine = None if cores is None else Machine(cores)
        speed = trace.engine
        self.trace = trace
        self.version = 0
        self.engines = [
            SharedServer(1 / speed.alone_tokens_per_second, 1 / speed.full_tokens_per_second, machine)
            for _ in range(engines)
        ]
        self.workers = [SimulatedWorker(self, SharedServer(0.0, 1.0, machine), number) for number in range(workers)]
        self.trainer = SharedServer(0.0, 1.0, machine)
        self._trainers = trainers

    async def train(self, tokens: int) -> None:
        """One step."""
        speed = self.trace.trainer
        await self.trainer.serve(speed.step_seconds + tokens / (speed.tokens_per_second * self._trainers))

    async def swap(self, version: int) -> None:
        """New weights, on every engine at once; requests that are running go on under them."""
        await asyncio.gather(*(engine.hold(self.trace.engine.swap_seconds) for engine in self.engines))
        self.version = version

    def least_loaded_engine(self) -> SharedServer:
        return min(self.engines, key=lambda engine: engine.jobs)


class SimulatedWorker:
    """Plays the part of a rollout worker towards the real pipeline."""

    def __init__(self, cluster: Cluster, process: SharedServer, number: int) -> None:
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


@dataclass(frozen=True)
class Scenario:
    trace: Trace
    engines: int = 1
    trainers: int = 1
    workers: int = 1
    batch_size: int = 32
    """Groups per step."""
    n_samples: int = 8
    max_head_offpolicyness: int = 2
    max_concurrent_rollouts: int = 256
    steps: int = 50
    cores: float | None = None
    """One machine whose cores engines, workers and trainer share; None = nobody waits for a core."""


@dataclass(frozen=True)
class Prediction:
    seconds: float
    episodes: int
    tokens: float
    trainer_idle: float
    """Share of the time in which the trainer waited for episodes."""
    engine_idle: float
    """Share of the time in which an engine had no request, mean over engines."""
    engine_requests: float
    """Requests at an engine, mean over time and engines."""
    staleness: dict[int, int]
    """Versions behind -> trained episodes."""
    expired: int
    """Episodes that became too old to be trained."""

    @property
    def mean_staleness(self) -> float:
        return sum(lag * count for lag, count in self.staleness.items()) / self.episodes


def predict(scenario: Scenario) -> Prediction:
    return run_virtually(_Run(scenario).play())


@dataclass
class _Run:
    scenario: Scenario
    staleness: Counter[int] = field(default_factory=Counter)
    tokens: float = 0.0

    async def play(self) -> Prediction:
        s = self.scenario
        cluster = Cluster(s.trace, engines=s.engines, workers=s.workers, trainers=s.trainers, cores=s.cores)
        admission = Admission(
            batch_size=s.batch_size,
            max_staleness=s.max_head_offpolicyness,
            max_running=max(1, s.max_concurrent_rollouts // s.n_samples),
            total_groups=s.steps * s.batch_size,
        )
        tasks: TaskStream = ((number, {}) for number in itertools.count())
        pipeline = Pipeline(cluster.workers, admission, tasks, n_samples=s.n_samples, max_idle_rejections=sys.maxsize)
        pipeline.publish(0, "")
        for version in range(s.steps):
            groups = await pipeline.take(s.batch_size)
            await cluster.train(self._note(groups, version))
            await cluster.swap(version + 1)
            pipeline.publish(version + 1, "")
        seconds = asyncio.get_running_loop().time()
        await pipeline.aclose()
        return self._prediction(cluster, seconds, pipeline.tally.counts.total())

    def _note(self, groups: list[GroupResult], version: int) -> int:
        """Tokens of a batch that is trained at `version`."""
        rows = [row for group in groups for episode in group.episodes for row in episode.rows]
        self.staleness.update(version - int(row.versions.min()) for row in rows)
        tokens = sum(row.reward for row in rows)
        self.tokens += tokens
        return round(tokens)

    def _prediction(self, cluster: Cluster, seconds: float, expired: int) -> Prediction:
        def mean(values: list[float]) -> float:
            return sum(values) / len(values) / seconds

        engines: list[SharedServer] = cluster.engines
        return Prediction(
            seconds=seconds,
            episodes=self.staleness.total(),
            tokens=self.tokens,
            trainer_idle=1 - cluster.trainer.busy_seconds / seconds,
            engine_idle=1 - mean([engine.busy_seconds for engine in engines]),
            engine_requests=mean([engine.job_seconds for engine in engines]),
            staleness=dict(sorted(self.staleness.items())),
            expired=expired,
        )
