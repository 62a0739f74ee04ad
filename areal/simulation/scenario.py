"""Predict a run: the real pipeline between simulated engines and workers and a simulated trainer.

Everything happens on an event loop whose clock jumps to the next event instead of waiting for it, so the code that runs
on it is unchanged: timers, time-outs and `asyncio.sleep` mean virtual seconds. Such a loop cannot wait for the outside
world: when nothing is scheduled any more, nothing can ever happen, and that is an error.

What a part costs is said by the file of that part: a training step by ranks.py, new weights by fanout.py, and how often
something ends by failures.py. By default none of them costs anything.
"""

import asyncio
import itertools
import random
import selectors
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from areal.api.errors import ConfigError, GroupLost
from areal.api.messages import Episode, GroupResult, GroupTask, Row
from areal.config.rollout import WhenStale
from areal.rollout.admission import Admission
from areal.rollout.dispatch import GroupWorker
from areal.rollout.pipeline import Pipeline, TaskStream
from areal.simulation.failures import HOUR, Checkpoints, Failures
from areal.simulation.fanout import FanOut
from areal.simulation.ranks import RankSpeed, StepTime
from areal.simulation.servers import Machine, Router, ServerLost, SharedServer
from areal.simulation.trace import Trace, Turn

T = TypeVar("T")
MAX_RUN_FAILURES = 1000
"""Then a run does not get on."""


@dataclass(frozen=True)
class DriverSpeed:
    """Processor seconds of the driver, which has one event loop and one interpreter lock."""

    receive_episode_seconds: float = 0.0
    receive_token_seconds: float = 0.0
    """To receive an episode and each of its tokens, while the trainer works."""
    deal_episode_seconds: float = 0.0
    deal_token_seconds: float = 0.0
    """To make a batch of them and deal it to the ranks, which wait for it."""


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
    when_stale: WhenStale = "wait"
    max_concurrent_rollouts: int = 256
    steps: int = 50
    cores: float | None = None
    """Of one machine that engines, workers and trainer share; None = each has all the cores it needs."""
    ranks: RankSpeed | None = None
    """Who trains; None = `trainers` at the speed that the trace gives one."""
    rank_hosts: int = 1
    gpus_per_engine: int = 1
    engines_per_host: int = 1
    prompt_tokens: float = 0.0
    """Of an episode: they are computed again when an engine ends, and trained along."""
    fan_out: FanOut = field(default_factory=FanOut)
    driver: DriverSpeed = field(default_factory=DriverSpeed)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    failures: Failures = field(default_factory=Failures)

    @property
    def engine_hosts(self) -> int:
        return -(-self.engines // self.engines_per_host)

    @property
    def trainer_gpus(self) -> int:
        return self.ranks.ranks.count if self.ranks else self.trainers

    @property
    def gpus(self) -> int:
        return self.engines * self.gpus_per_engine + self.trainer_gpus

    @property
    def max_running(self) -> int:
        """Groups."""
        return max(1, self.max_concurrent_rollouts // self.n_samples)


@dataclass(frozen=True)
class Losses:
    """What failures did."""

    counts: dict[str, int]
    """By what ended: engine, engine host, worker, run (a rank or the driver)."""
    gpu_hours: dict[str, float]
    """Lost with them: GPUs without work while something starts again, and work that is done once more."""
    steps_again: int
    """Trained again from an older checkpoint."""
    tokens_again: float
    """Of prompts and answers, which other engines computed again, or which were drawn for nothing."""


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
    step_seconds: float = 0.0
    loop: dict[str, float] = field(default_factory=dict)
    """Shares of the training loop's time by what it did, or waited for; 1 together."""
    utilisation: dict[str, float] = field(default_factory=dict)
    """Of each part, from 0 to 1. These three are means after the first quarter of the steps: it fills the pipeline."""
    losses: Losses = field(default_factory=lambda: Losses({}, {}, 0, 0.0))
    goodput: float = 1.0
    """Share of all GPU-hours that was not lost by failures."""

    @property
    def mean_staleness(self) -> float:
        return sum(lag * count for lag, count in self.staleness.items()) / self.episodes


def predict(scenario: Scenario) -> Prediction:
    return run_virtually(_Simulation(scenario).run())


@dataclass
class _Step:
    """What one step trained. A step that is trained again replaces it."""

    staleness: Counter[int]
    tokens: list[float]
    """Of each episode."""
    trained: list[int]
    rejected: list[int]
    """Tasks, which a run that goes on from here must not begin again."""

    @classmethod
    def of(cls, groups: list[GroupResult], version: int, rejected: list[int]) -> "_Step":
        episodes = [episode for group in groups for episode in group.episodes]
        oldest = (episode.oldest_version for episode in episodes)
        return cls(
            Counter(version - each for each in oldest if each is not None),
            [row.reward for episode in episodes for row in episode.rows],
            [group.task_id for group in groups],
            rejected,
        )


@dataclass
class _Simulation:
    scenario: Scenario
    steps: dict[int, _Step] = field(default_factory=dict)
    loop_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    saved_step: int = 0
    saved_at: float = 0.0
    """When the newest checkpoint was taken."""
    expired: int = 0
    steps_again: int = 0
    filled: "_Meters | None" = None
    """Once a quarter of the steps is done."""

    async def run(self) -> Prediction:
        s = self.scenario
        cluster = _Cluster(s)
        if not s.failures.possible:
            await self._attempt(cluster)
        else:
            await self._through_failures(cluster)
        return self._prediction(cluster, _now())

    async def _through_failures(self, cluster: "_Cluster") -> None:
        breakdowns = _Breakdowns(self.scenario, cluster)
        try:
            while await breakdowns.interrupts(self._attempt(cluster)):
                done = len(self.steps)
                self.steps_again += done - self.saved_step
                self.steps = {number: step for number, step in self.steps.items() if number < self.saved_step}
                with self._part("restarting"):
                    await breakdowns.start_run_again(self.saved_at)
                self.saved_at = _now()
        finally:
            breakdowns.end()

    async def _attempt(self, cluster: "_Cluster") -> None:
        """The run, from its newest checkpoint to its end."""
        s, first = self.scenario, self.saved_step
        admission = Admission(
            batch_size=s.batch_size,
            max_staleness=s.max_head_offpolicyness,
            max_running=s.max_running,
            total_groups=s.steps * s.batch_size,
            consumed=first * s.batch_size,
            when_stale=s.when_stale,
        )
        settled = {task for step in self.steps.values() for task in (*step.trained, *step.rejected)}
        tasks: TaskStream = ((number, {}) for number in itertools.count() if number not in settled)
        pipeline = Pipeline(cluster.workers, admission, tasks, n_samples=s.n_samples, max_idle_rejections=sys.maxsize)
        publishing: asyncio.Task[None] | None = None
        saving: asyncio.Task[None] | None = None

        async def publish(version: int) -> None:
            await cluster.publish(version)
            pipeline.publish(version, "")

        try:
            if _now() > 0:  # engines have the first weights before a run begins, but not those of a checkpoint
                with self._part("publishing"):
                    await publish(first)
            else:
                pipeline.publish(0, "")
            for version in range(first, s.steps):
                with self._part("waiting for episodes"):
                    groups = await pipeline.take(s.batch_size)
                self._split_waiting(pipeline.expiring_wait_seconds)
                step = _Step.of(groups, version, pipeline.pop_rejected())
                await self._train(cluster, [tokens + s.prompt_tokens for tokens in step.tokens])
                self.steps[version] = step
                with self._part("publishing"):
                    if publishing is not None:
                        await publishing
                    publishing = asyncio.ensure_future(publish(version + 1))
                    if not s.fan_out.while_training or version + 1 == s.steps:
                        await publishing
                if self.filled is None and version + 1 >= s.steps // 4:
                    self.filled = self._meters(cluster)
                if s.checkpoints.steps and (version + 1) % s.checkpoints.steps == 0:
                    with self._part("saving"):
                        if saving is not None:
                            await saving
                        await asyncio.sleep(s.checkpoints.pause_seconds)
                    saving = asyncio.ensure_future(self._save(version + 1))
        finally:
            for task in filter(None, (publishing, saving)):
                task.cancel()
            self.expired += pipeline.rejections.counts.total()
            await pipeline.aclose()

    async def _train(self, cluster: "_Cluster", sequences: list[float]) -> None:
        time = cluster.step_time(sequences)
        with self._part("dealing"):
            await cluster.deal(sequences)
        with self._part("computing"):
            await cluster.trainer.serve(time.computing)
        with self._part("communicating"):
            await cluster.trainer.serve(time.communicating)
        cluster.network_bytes += time.network_bytes

    async def _save(self, step: int) -> None:
        taken = _now()
        await asyncio.sleep(self.scenario.checkpoints.write_seconds)
        self.saved_step, self.saved_at = step, taken

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Count the time of this part of the training loop, also if it is broken off."""
        began = _now()
        try:
            yield
        finally:
            self.loop_seconds[name] += _now() - began

    def _split_waiting(self, expiring_seconds: float) -> None:
        """How much of the last wait was for episodes about to expire."""
        self.loop_seconds["waiting for episodes"] -= expiring_seconds
        self.loop_seconds["waiting for the oldest"] += expiring_seconds

    def _meters(self, cluster: "_Cluster") -> "_Meters":
        return _Meters(_now(), len(self.steps), dict(self.loop_seconds), cluster.used_seconds())

    def _prediction(self, cluster: "_Cluster", seconds: float) -> Prediction:
        def mean(values: list[float]) -> float:
            return sum(values) / len(values) / seconds

        last = self._meters(cluster)
        first = self.filled if self.filled is not None and self.filled.steps < last.steps else _Meters()
        passed = last.at - first.at
        s, losses = self.scenario, cluster.losses
        staleness = sum((step.staleness for step in self.steps.values()), Counter[int]())
        trained = [task for step in self.steps.values() for task in step.trained]
        assert len(trained) == len(set(trained)) == s.steps * s.batch_size, "every group is trained once"
        hours = {name: each / HOUR for name, each in losses.gpu_seconds.items()}
        return Prediction(
            seconds=seconds,
            episodes=staleness.total(),
            tokens=float(sum(sum(step.tokens) for step in self.steps.values())),
            trainer_idle=1 - cluster.trainer.busy_seconds / seconds,
            engine_idle=1 - mean([engine.busy_seconds for engine in cluster.engines]),
            engine_requests=mean([engine.job_seconds for engine in cluster.engines]),
            staleness=dict(sorted(staleness.items())),
            expired=self.expired,
            step_seconds=passed / (last.steps - first.steps),
            loop={name: (spent - first.loop.get(name, 0.0)) / passed for name, spent in last.loop.items() if spent},
            utilisation={name: (used - first.used.get(name, 0.0)) / passed for name, used in last.used.items()},
            losses=Losses(dict(losses.counts), hours, self.steps_again, losses.tokens_again),
            goodput=1 - sum(hours.values()) * HOUR / (s.gpus * seconds),
        )


@dataclass(frozen=True)
class _Meters:
    """What has been counted until a moment of the run."""

    at: float = 0.0
    steps: int = 0
    loop: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)


class _Cluster:
    """Simulated engines, rollout workers, trainer and driver, and the hosts' networks."""

    def __init__(self, scenario: Scenario) -> None:
        machine = None if scenario.cores is None else Machine(scenario.cores)
        self.scenario = scenario
        self.trace = scenario.trace
        self.version = 0
        speed = self.trace.engine
        self.engines = [
            SharedServer(1 / speed.alone_tokens_per_second, 1 / speed.full_tokens_per_second, machine)
            for _ in range(scenario.engines)
        ]
        self.router = Router(self.engines)
        self.workers = [
            _SimulatedWorker(self, SharedServer(0.0, 1.0, machine), number) for number in range(scenario.workers)
        ]
        self.trainer = SharedServer(0.0, 1.0, machine)
        self.driver = SharedServer(0.0, 1.0, machine)
        self._receiving = asyncio.Lock()
        self.losses = _Losses()
        self.network_bytes = 0.0
        """Into each host of ranks, for training."""
        self.versions = 0
        """Published to all engines."""
        self._running, self._running_since, self._running_seconds = 0, 0.0, 0.0

    def step_time(self, sequences: list[float]) -> StepTime:
        if self.scenario.ranks is not None:
            return self.scenario.ranks.step(sequences)
        speed, tokens = self.trace.trainer, round(sum(sequences))
        return StepTime(speed.step_seconds + tokens / (speed.tokens_per_second * self.scenario.trainers), 0.0, 1, 0.0)

    async def deal(self, sequences: list[float]) -> None:
        """A batch, to the ranks; the driver may have other things to do."""
        speed = self.scenario.driver
        await self.driver.serve(len(sequences) * speed.deal_episode_seconds + sum(sequences) * speed.deal_token_seconds)

    async def receive(self, group: GroupResult) -> None:
        """A group, from its worker: one after the other, as an event loop does it."""
        speed = self.scenario.driver
        tokens = sum(row.reward + self.scenario.prompt_tokens for episode in group.episodes for row in episode.rows)
        work = len(group.episodes) * speed.receive_episode_seconds + tokens * speed.receive_token_seconds
        if work:
            async with self._receiving:
                await self.driver.serve(work)

    async def publish(self, version: int) -> None:
        """Write new weights, stage them at every engine, and swap them in at once; running requests go on with them."""
        fan_out = self.scenario.fan_out
        if fan_out.size_bytes:
            await asyncio.sleep(fan_out.write_seconds)
            await self._stage()
        await asyncio.gather(*(engine.hold(self.trace.engine.swap_seconds) for engine in self.engines))
        self.version = version
        self.versions += 1

    async def _stage(self) -> None:
        """As long as the tightest limit lets it take; what the driver serves waits for what else that has to do."""
        fan_out, limits = self.scenario.fan_out, self.scenario.fan_out.limits()
        if not fan_out.from_ranks:
            serving = self.driver.serve(limits.pop("serving"))
            await asyncio.gather(serving, asyncio.sleep(max(limits.values())))
        else:
            await asyncio.sleep(max(limits.values()))
        await asyncio.sleep(fan_out.check_seconds)

    def count_running(self, change: int) -> None:
        """A group has begun or ended."""
        self._running_seconds += self._running * (_now() - self._running_since)
        self._running, self._running_since = self._running + change, _now()

    def used_seconds(self) -> dict[str, float]:
        """For how long each part would have been busy until now, had it worked at its full speed."""
        s, fan_out = self.scenario, self.scenario.fan_out
        self.count_running(0)
        full = s.engines * s.trace.engine.full_tokens_per_second
        used = {
            "trainer": self.trainer.totals[0],
            "engines": sum(engine.totals[1] for engine in self.engines) / full,
            "rollout workers": sum(worker.process.totals[0] for worker in self.workers) / s.workers,
            "driver": self.driver.totals[0],
            "episodes at once": self._running_seconds / s.max_running,
        }
        if fan_out.hosts:
            network = fan_out.host_bytes_per_second
            sent = self.versions * fan_out.served_bytes / fan_out.source_hosts
            fetched = self.versions * fan_out.size_bytes
            if fan_out.from_ranks:
                used["network of rank hosts"] = (self.network_bytes + sent) / network
            else:
                used["network of the driver's host"] = sent / network
            used["network of engine hosts"] = fetched / network
            used["fetching weights"] = fetched * (fan_out.fetch_byte_seconds + fan_out.check_byte_seconds)
        return used


@dataclass
class _Losses:
    counts: Counter[str] = field(default_factory=Counter)
    gpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens_again: float = 0.0


class _Breakdowns:
    """Ends parts of a cluster at random moments, and starts them again."""

    def __init__(self, scenario: Scenario, cluster: _Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._run_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._restarts: set[asyncio.Task[None]] = set()
        f, s = scenario.failures, scenario
        engine_gpus = s.engines * s.gpus_per_engine
        self._causes = [
            asyncio.ensure_future(self._again_and_again(kind, HOUR * hours / parts, strike))
            for kind, hours, parts, strike in (
                ("engine", f.gpu_hours, engine_gpus, self._end_engine),
                ("engine host", f.host_hours, s.engine_hosts, self._end_host),
                ("worker", f.worker_hours, s.workers, self._end_worker),
                ("run", f.run_seconds(s.trainer_gpus, s.rank_hosts) / HOUR, 1, self._end_run),
            )
            if hours < float("inf")
        ]

    async def interrupts(self, attempt: Coroutine[Any, Any, None]) -> bool:
        """Whether `attempt` was broken off by the end of a rank or the driver, and not by its own."""
        task = asyncio.ensure_future(attempt)
        self._run_lost = asyncio.get_running_loop().create_future()
        await asyncio.wait({task, self._run_lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def start_run_again(self, saved_at: float) -> None:
        """All processes of the run, whatever state they were in."""
        s, losses = self._scenario, self._cluster.losses
        if losses.counts["run"] > MAX_RUN_FAILURES:
            raise ConfigError(
                f"a run must fail less often than it saves, and this one failed {MAX_RUN_FAILURES} times; set "
                "a smaller checkpoints.steps, or more hours between failures"
            )
        for restart in self._restarts:
            restart.cancel()
        self._restarts.clear()
        cluster = self._cluster
        for server in (*cluster.engines, cluster.trainer, cluster.driver, *(each.process for each in cluster.workers)):
            server.lose_jobs()
        losses.gpu_seconds["run"] += s.gpus * (_now() - saved_at + s.failures.run_restart_seconds)
        await asyncio.sleep(s.failures.run_restart_seconds)
        for engine in cluster.engines:
            cluster.router.bring_up(engine)
        for worker in cluster.workers:
            worker.come_back()

    def end(self) -> None:
        for task in (*self._causes, *self._restarts):
            task.cancel()

    async def _again_and_again(self, kind: str, mean_seconds: float, strike: Callable[[random.Random], bool]) -> None:
        draw = random.Random(f"{self._scenario.failures.seed}-{kind}")
        while True:
            await asyncio.sleep(draw.expovariate(1 / mean_seconds))
            self._cluster.losses.counts[kind] += strike(draw)

    def _end_engine(self, draw: random.Random) -> bool:
        """Whether it was up. Its host keeps the weights that it has fetched."""
        return self._take_down("engine", [draw.choice(self._cluster.engines)], 0)

    def _end_host(self, draw: random.Random) -> bool:
        each, host = self._scenario.engines_per_host, draw.randrange(self._scenario.engine_hosts)
        return self._take_down("engine host", self._cluster.engines[host * each : (host + 1) * each], 1)

    def _take_down(self, kind: str, engines: list[SharedServer], hosts_to_fill: int) -> bool:
        up = set(self._cluster.router.up)
        ended = [engine for engine in engines if engine in up]
        for engine in ended:
            self._cluster.router.take_down(engine)
            engine.lose_jobs()
        if ended:
            self._start(self._restart_engines(kind, ended, hosts_to_fill))
        return bool(ended)

    async def _restart_engines(self, kind: str, engines: list[SharedServer], hosts_to_fill: int) -> None:
        began, s = _now(), self._scenario
        try:
            await asyncio.sleep(s.failures.engine_restart_seconds)
            fetch = min(s.fan_out.hosts, hosts_to_fill)
            await asyncio.sleep(s.fan_out.stage_seconds(fetch) + s.trace.engine.swap_seconds)
            for engine in engines:
                self._cluster.router.bring_up(engine)
        finally:
            self._cluster.losses.gpu_seconds[kind] += len(engines) * s.gpus_per_engine * (_now() - began)

    def _end_worker(self, draw: random.Random) -> bool:
        worker = draw.choice(self._cluster.workers)
        if not worker.present:
            return False
        worker.end()
        self._start(self._restart_worker(worker))
        return True

    async def _restart_worker(self, worker: "_SimulatedWorker") -> None:
        await asyncio.sleep(self._scenario.failures.worker_restart_seconds)
        worker.come_back()

    def _end_run(self, draw: random.Random) -> bool:
        """Not while it is being started again."""
        if self._run_lost.done():
            return False
        self._run_lost.set_result(None)
        return True

    def _start(self, restart: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(restart)
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)


class _SimulatedWorker(GroupWorker):
    """A rollout worker, as far as the pipeline can see; it plays episodes of the trace."""

    def __init__(self, cluster: _Cluster, process: SharedServer, number: int) -> None:
        self.process = process
        self._cluster = cluster
        self._draw = random.Random(number)
        self._playing: dict[asyncio.Future[list[Row]], list[float]] = {}
        """Groups, and the tokens of their turns so far."""
        self._unasked: set[int] = set()
        """Tasks of the groups that have asked no engine for anything."""
        self._back = asyncio.Event()
        self._back.set()

    @property
    def present(self) -> bool:
        return self._back.is_set()

    async def until_present(self) -> None:
        await self._back.wait()

    async def run_group(self, task: GroupTask) -> GroupResult:
        self._cluster.count_running(+1)
        self._unasked.add(task.task_id)
        try:
            rows = await self._play_group(task)
            result = GroupResult(task.task_id, [Episode([row], 0.0, calls=len(row.versions)) for row in rows], [], {})
            await self._cluster.receive(result)
            return result
        finally:
            self._unasked.discard(task.task_id)
            self._cluster.count_running(-1)

    async def unasked_groups(self) -> list[int]:
        return list(self._unasked)

    def end(self) -> None:
        """Its groups are lost."""
        self._back.clear()
        engine, losses = self._cluster.trace.engine, self._cluster.losses
        for playing, drawn in self._playing.items():
            playing.cancel()
            losses.tokens_again += sum(drawn)
            gpus = self._cluster.scenario.gpus_per_engine
            losses.gpu_seconds["worker"] += gpus * sum(drawn) / engine.full_tokens_per_second

    def come_back(self) -> None:
        self._back.set()

    async def _play_group(self, task: GroupTask) -> list[Row]:
        episodes = self._cluster.trace.episodes
        chosen = [self._draw.choice(episodes) for _ in range(task.n_samples)]
        drawn: list[float] = []
        playing = asyncio.gather(*(self._play(task.task_id, turns, drawn) for turns in chosen))
        self._playing[playing] = drawn
        try:
            return await playing
        except asyncio.CancelledError:
            if self.present:
                raise  # it is the run that ends
            raise GroupLost("the worker has ended") from None
        finally:
            del self._playing[playing]

    async def _play(self, task_id: int, turns: list[Turn], drawn: list[float]) -> Row:
        versions, client = [], self._cluster.trace.client
        context = self._cluster.scenario.prompt_tokens
        for turn in turns:
            await asyncio.sleep(turn.wait_seconds)
            await self.process.serve(client.call_seconds + turn.tokens * client.token_seconds)
            self._unasked.discard(task_id)
            versions.append(self._cluster.version)
            await self._generate(turn.tokens, context)
            drawn.append(turn.tokens)
            context += turn.tokens
        return _row(versions, sum(turn.tokens for turn in turns))

    async def _generate(self, tokens: float, context: float) -> None:
        """If the engine ends, another computes what there was and goes on."""
        speed, losses = self._cluster.trace.engine, self._cluster.losses
        work = tokens
        while True:
            engine = await self._cluster.router.least_loaded()
            try:
                return await engine.serve(work)
            except ServerLost as lost:
                again = context + max(0.0, tokens - lost.undone)
                losses.tokens_again += again
                seconds = again * speed.recompute_token_seconds
                losses.gpu_seconds["engine"] += self._cluster.scenario.gpus_per_engine * seconds
                work = min(tokens, lost.undone) + seconds * speed.full_tokens_per_second


def _now() -> float:
    return asyncio.get_running_loop().time()


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
        if timeout is None:
            raise RuntimeError("the simulation waits for something that will never happen")
        self.now += max(0.0, timeout)
        return []  # nothing outside is waited for, so the kernel is not asked
