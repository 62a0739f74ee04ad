"""The asynchronous half of a run: the engines, the rollout workers and the pipeline between them.

The trainer's thread computes and calls `Fleet`, which is synchronous; everything else lives on the event loop of its
cluster (`cluster.py`), in a thread of its own. `processes.py` starts processes and replaces those that die,
`engines.py` knows which engines serve and gives them weights, `workers.py` sends groups to the rollout workers. In
`rollout.in_process` mode the worker is an object on that event loop instead of a process.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import WeightUpdate
from areal.api.errors import RejectReason
from areal.api.messages import WORKER_ROLE, Doing, EngineAddress, GroupResult, WorkerSetup
from areal.config.experiment import PPOConfig
from areal.engine.models import max_positions, vocab_size
from areal.infra.scheduler import Ask
from areal.rollout.admission import Admission
from areal.rollout.loading import WorkflowSpec
from areal.rollout.pipeline import Filter, GroupRecord, Pipeline, Rejections, Tally, TaskStream
from areal.trainer.cluster import Cluster
from areal.trainer.engines import Engines, EngineState, engine_asks
from areal.trainer.processes import OnEvent, ask
from areal.trainer.ranks import rank_asks
from areal.trainer.status import RunStatus
from areal.trainer.workers import RemoteWorker, worker_ask
from areal.utils import waits
from areal.utils.closing import Closing

if TYPE_CHECKING:
    from areal.rollout.worker import RolloutWorker

GROUP_GRACE_SECONDS = 60.0
"""Beyond an episode's own deadline: until then a worker may be busy, after that it is stuck."""


def trainer_ask(config: PPOConfig) -> Ask:
    """What the trainer needs, which runs in the driver."""
    return replace(ask("trainer", config.actor, config.actor.gpus), with_driver=True)


def all_asks(config: PPOConfig) -> list[Ask]:
    """What the processes of a run need of their hosts."""
    workers = 0 if config.rollout.in_process else config.rollout.num_workers
    trainer = rank_asks(config.actor) if config.actor.backend else [trainer_ask(config)]
    return [*trainer, *engine_asks(config.rollout), *(worker_ask(index) for index in range(workers))]


@dataclass
class FleetStatus:
    """What a fleet is doing, and what it has done so far."""

    engines: dict[str, int]
    """By state."""
    workers: dict[str, int]
    """Those that are present, and those that are being started again."""
    weight_updates: int
    staging_seconds: float
    swapping_seconds: float
    version: int | None = None
    """Of the weights that were published last; None = episodes have not begun."""
    episodes: dict[str, int] = field(default_factory=dict)
    """Running, ready to be trained, or of an evaluation."""
    rejected: dict[str, dict[RejectReason, int]] = field(default_factory=dict)
    """By purpose and reason."""
    sampled_tokens: int = 0


class Fleet(Closing):
    def __init__(
        self,
        config: PPOConfig,
        model: Path,
        tokenizer: Path,
        workflow: WorkflowSpec,
        eval_workflow: WorkflowSpec,
        *,
        logs: Path,
        engine_threads: int,
        cluster: Cluster | None = None,
        status: RunStatus | None = None,
        on_event: OnEvent = lambda kind, detail: None,
    ) -> None:
        """Start every process; raises at once if one cannot start.

        `cluster`: one that others use too, with places reserved for `all_asks`; None = one of its own, which tells
        `on_event` of deaths and restarts. `status` is told to look at it, from before its processes start.
        """
        self._config = config
        self.cluster = cluster or Cluster(config.scheduler, logs, [model, tokenizer], on_event)
        self._owns_cluster = cluster is None
        self._processes = self.cluster.processes
        self._pipeline: Pipeline | None = None
        self._workers: list[RemoteWorker] = []
        self._local: RolloutWorker | None = None
        """The worker that runs inside the driver, if there is one."""
        self._following: set[asyncio.Task[None]] = set()
        self._engines: Engines | None = None
        self.cluster.when_failed(self._give_up)
        self._status = status
        if status is not None:
            status.watch(self.cluster, self)
        try:
            self._engines = Engines.of(
                config.rollout, model, self._processes, self._tell_workers, threads=engine_threads
            )
            elsewhere = config.scheduler.type != "local"
            setup = WorkerSetup(
                rollout=config.rollout,
                gconfig=config.gconfig,
                workflow=workflow.pack(by_value=elsewhere, reward_fn=config.reward_fn),
                eval_workflow=eval_workflow.pack(by_value=elsewhere, reward_fn=config.reward_fn),
                engines=[],
                tokenizer_path=str(tokenizer),
                max_positions=max_positions(model),
                reward_fn=config.reward_fn,
                proxy=config.proxy.with_key(),
                seed=config.seed,
                vocab_size=vocab_size(model),
            )
            self.cluster.wait(self._start(setup, self._engines))
            if status is not None:
                status.reachable_at(self._processes.host)
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        tasks: TaskStream,
        admission: Admission,
        keep: Filter | None,
        record: GroupRecord,
        ready: Sequence[GroupResult],
    ) -> None:
        """Make the pipeline, with the groups that are `ready` already; episodes start with the first `publish`."""
        rollout = self._config.rollout

        async def make() -> Pipeline:
            return Pipeline(
                self._workers if self._local is None else [self._local],
                admission,
                tasks,
                n_samples=self._config.gconfig.n_samples,
                max_idle_rejections=rollout.max_idle_rejections,
                keep=keep,
                group_seconds=rollout.rounds * (rollout.agent.timeout_seconds + GROUP_GRACE_SECONDS),
                record=record,
                ready=ready,
            )

        self._pipeline = self.cluster.wait(make())
        self.cluster.when_failed(self._pipeline.fail)

    def take(self, count: int) -> list[GroupResult]:
        """The next `count` finished groups; waits for them."""
        return self.cluster.wait(self._running.take(count))

    def pop_lost(self) -> tuple[list[int], Tally]:
        """The numbers of the tasks that were rejected since the last call, and the groups of them that were sampled and
        became too old. In one call, because the trainer waits for its turn on the event loop."""

        async def pop() -> tuple[list[int], Tally]:
            return self._running.pop_rejected(), self._running.pop_dropped()

        return self.cluster.wait(pop())

    @property
    def expiring_wait_seconds(self) -> float:
        """How long the latest `take` waited, with enough groups ready, for others that were about to expire."""
        return self._running.expiring_wait_seconds

    def evaluate(
        self,
        tasks: Sequence[dict[str, Any]],
        *,
        greedy: bool,
        on_result: Callable[[GroupResult], None] = lambda result: None,
    ) -> list[GroupResult]:
        """Each task once; `on_result` gets each result when it comes, on the event loop."""
        max_running = self._config.rollout.max_concurrent_rollouts
        evaluating = self._running.evaluate(tasks, greedy=greedy, max_running=max_running, on_result=on_result)
        return self.cluster.wait(evaluating)

    def publish(self, update: WeightUpdate) -> None:
        """Give the engines new weights, then let admission know."""

        async def publish() -> None:
            self.cluster.shipper.published = update
            with waits.current().entered(f"publishes version {update.version}"):
                await self._started_engines.publish(update)
            self._running.publish(update.version, update.digest)

        self.cluster.wait(publish())

    @property
    def shared_memory(self) -> Path:
        """A directory for the weights that are published here; it is removed with the run, also if that is killed."""
        return self._processes.shared_memory

    @property
    def rejections(self) -> Rejections:
        return self._running.rejections

    @property
    def stalls(self) -> list[str]:
        """What blocked the rollout workers' event loops, a sentence per line of code."""
        return self._running.stalls.summary()

    def status(self) -> FleetStatus:
        """Call it on the event loop."""
        engines = self._started_engines
        states = Counter(member.state for member in engines.members)
        present = sum(worker.present for worker in self._workers) if self._local is None else 1
        status = FleetStatus(
            {state.value: states[state] for state in EngineState},
            {"present": present, "absent": max(0, len(self._workers) - present)},
            engines.published,
            engines.staging_seconds,
            engines.swapping_seconds,
        )
        if (pipeline := self._pipeline) is not None:
            samples, admission = self._config.gconfig.n_samples, pipeline.admission
            status.version = admission.version
            status.episodes = {
                "running": admission.running * samples,
                "ready": admission.ready * samples,
                "evaluating": pipeline.evaluating,
            }
            counted = {"training": pipeline.rejections, "evaluation": pipeline.evaluation_rejections}
            status.rejected = {purpose: dict(rejections.counts) for purpose, rejections in counted.items()}
            status.sampled_tokens = pipeline.sampled_tokens
        return status

    async def doings(self) -> list[Doing]:
        """What the driver knows of its own parts. Call it on the event loop."""
        told = [self._pipeline.doing()] if self._pipeline is not None else []
        if self._local is not None:
            told.append(Doing(f"{WORKER_ROLE} 0", "runs in the driver", inside=await self._local.doing()))
        return told

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of every process so far."""
        return self.cluster.wait(self._processes.cpu_seconds())

    def engine_activity(self) -> list[tuple[float, float]]:
        """When an engine was generating, as (start, end)."""
        return self.cluster.wait(self._started_engines.activity())

    def engine_pauses(self) -> list[float]:
        """For how long each published version held up generation."""
        return self.cluster.wait(self._started_engines.pauses())

    def fail(self, error: Exception) -> None:
        """Make every waiting call raise this error. Call it on the event loop."""
        self.cluster.fail(error)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the event loop, without waiting; safe in a signal handler."""
        self.cluster.call_soon(function)

    def close(self) -> None:
        if self._status is not None:
            self._status.forget()
        try:
            if self._pipeline is not None:
                self.cluster.finish(self._pipeline.aclose())
        finally:
            self.cluster.finish(self._close())
            if self._owns_cluster:
                self.cluster.close()

    def _give_up(self, error: Exception) -> None:
        if self._engines is not None:
            self._engines.give_up()

    async def _start(self, setup: WorkerSetup, engines: Engines) -> None:
        """Start all processes at once; the workers are set up as soon as an engine serves."""
        rollout = self._config.rollout
        if not rollout.in_process:
            self._workers = [
                RemoteWorker(index, setup, engines, self._processes) for index in range(rollout.num_workers)
            ]
        # The clients of online sessions could not find a new worker at another port.
        never_again = [WORKER_ROLE] if rollout.agent.mode == "online" and setup.proxy.port == 0 else []
        await self._processes.start([*engines.members, *self._workers], never_again, [trainer_ask(self._config)])
        if rollout.in_process:
            from areal.rollout.worker import RolloutWorker  # else it runs in processes of its own

            self._local = await RolloutWorker.start(
                replace(setup, engines=engines.serving), self._processes.secret, engines.lost
            )
            self._tell_workers(engines.serving)

    def _tell_workers(self, engines: list[EngineAddress]) -> None:
        for worker in self._workers:
            worker.follow(engines)
        if self._local is not None:
            following = asyncio.ensure_future(self._local.follow(engines))
            self._following.add(following)
            following.add_done_callback(self._following.discard)

    async def _close(self) -> None:
        if self._engines is not None:
            await self._engines.close()
        if self._local is not None:
            await self._local.aclose()

    @property
    def _started_engines(self) -> Engines:
        assert self._engines is not None, "they are made before anything else"
        return self._engines

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "begin() comes first"
        return self._pipeline
