"""Predict a run: the real pipeline between simulated engines and workers and a simulated trainer.

Everything happens on an event loop whose clock jumps to the next event instead of waiting for it, so the code that runs
on it is unchanged: timers, time-outs and `asyncio.sleep` mean virtual seconds. Such a loop cannot wait for the outside
world: when nothing is scheduled any more, nothing can ever happen, and that is an error.
"""

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
from areal.rollout.dispatch import GroupWorker
from areal.rollout.pipeline import Pipeline, TaskStream
from areal.simulation.servers import Machine, SharedServer
from areal.simulation.trace import Trace, Turn

T = TypeVar("T")


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
    """Of one machine that engines, workers and trainer share; None = each has all the cores it needs."""


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
    """Episodes by staleness in versions: from an episode's oldest token to the step that trained it."""
    expired: int
    """Episodes that became too old to be trained."""

    @property
    def mean_staleness(self) -> float:
        return sum(lag * count for lag, count in self.staleness.items()) / self.episodes


def predict(scenario: Scenario) -> Prediction:
    return run_virtually(_Simulation(scenario).run())


@dataclass
class _Simulation:
    scenario: Scenario
    staleness: Counter[int] = field(default_factory=Counter)
    tokens: float = 0.0

    async def run(self) -> Prediction:
        s = self.scenario
        cluster = _Cluster(s)
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
            await cluster.train(self._count(groups, version))
            await cluster.swap(version + 1)
            pipeline.publish(version + 1, "")
        seconds = asyncio.get_running_loop().time()
        await pipeline.aclose()
        return self._prediction(cluster, seconds, pipeline.rejections.counts.total())

    def _count(self, groups: list[GroupResult], version: int) -> int:
        """Tokens of a batch that is trained at `version`."""
        episodes = [episode for group in groups for episode in group.episodes]
        oldest = (episode.oldest_version for episode in episodes)
        self.staleness.update(version - each for each in oldest if each is not None)
        tokens = sum(row.reward for episode in episodes for row in episode.rows)
        self.tokens += tokens
        return round(tokens)

    def _prediction(self, cluster: "_Cluster", seconds: float, expired: int) -> Prediction:
        def mean(values: list[float]) -> float:
            return sum(values) / len(values) / seconds

        return Prediction(
            seconds=seconds,
            episodes=self.staleness.total(),
            tokens=self.tokens,
            trainer_idle=1 - cluster.trainer.busy_seconds / seconds,
            engine_idle=1 - mean([engine.busy_seconds for engine in cluster.engines]),
            engine_requests=mean([engine.job_seconds for engine in cluster.engines]),
            staleness=dict(sorted(self.staleness.items())),
            expired=expired,
        )


class _Cluster:
    """Simulated engines, rollout workers and trainer."""

    def __init__(self, scenario: Scenario) -> None:
        machine = None if scenario.cores is None else Machine(scenario.cores)
        self.trace = scenario.trace
        self.version = 0
        speed = self.trace.engine
        self.engines = [
            SharedServer(1 / speed.alone_tokens_per_second, 1 / speed.full_tokens_per_second, machine)
            for _ in range(scenario.engines)
        ]
        self.workers = [
            _SimulatedWorker(self, SharedServer(0.0, 1.0, machine), number) for number in range(scenario.workers)
        ]
        self.trainer = SharedServer(0.0, 1.0, machine)
        self._trainers = scenario.trainers

    async def train(self, tokens: int) -> None:
        """One step."""
        speed = self.trace.trainer
        await self.trainer.serve(speed.step_seconds + tokens / (speed.tokens_per_second * self._trainers))

    async def swap(self, version: int) -> None:
        """New weights, on every engine at once; running requests go on with them."""
        await asyncio.gather(*(engine.hold(self.trace.engine.swap_seconds) for engine in self.engines))
        self.version = version

    def least_loaded_engine(self) -> SharedServer:
        return min(self.engines, key=lambda engine: engine.jobs)


class _SimulatedWorker(GroupWorker):
    """A rollout worker, as far as the pipeline can see; it plays episodes of the trace."""

    def __init__(self, cluster: _Cluster, process: SharedServer, number: int) -> None:
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
    """An entry per turn; the field `reward`, which is not needed here, carries the number of tokens."""
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


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, beginning at virtual second 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingClock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _JumpingClock(selectors.SelectSelector):
    """Never sleeps: a time to sleep is added to the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the simulation waits for something that will never happen")
            self.now += max(0.0, timeout)
        return ready
