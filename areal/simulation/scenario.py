"""A run that is only imagined: the real pipeline between a simulated cluster and a simulated trainer."""

import asyncio
import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field

from areal.api.messages import GroupResult
from areal.rollout.admission import Admission
from areal.rollout.pipeline import Pipeline, TaskStream
from areal.simulation.cluster import Cluster
from areal.simulation.servers import Server
from areal.simulation.trace import Trace
from areal.simulation.virtual_time import run_virtually


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

        engines: list[Server] = cluster.engines
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
