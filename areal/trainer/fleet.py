"""The asynchronous half of a run behind synchronous calls: engine, rollout workers and the pipeline between them.

The trainer's thread computes; everything here lives on an event loop in a thread of its own. A process that dies makes
every waiting call raise what died, rather than what its death broke.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, EngineError
from areal.api.messages import GroupResult
from areal.config.experiment import PPOConfig
from areal.engine.model_choice import max_positions
from areal.infra.channel import ChannelClosed
from areal.infra.loop_thread import LoopThread
from areal.rollout.admission import Admission
from areal.rollout.pipeline import Filter, Pipeline, Tally, TaskStream
from areal.rollout.worker import WorkerSetup
from areal.rollout.workflows import WorkflowSpec
from areal.trainer.processes import Processes

T = TypeVar("T")

CAUSE_SECONDS = 2.0
"""A broken connection is noticed before the death that broke it; how long to wait for the better explanation."""

GROUP_GRACE_SECONDS = 60.0
"""Beyond an episode's own deadline: until then a worker may be busy, after it it is stuck."""


class Fleet:
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
    ) -> None:
        """Start every process; what cannot start is told at once."""
        self._config = config
        self._loop = LoopThread()
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._pipeline: Pipeline | None = None
        self._processes = Processes(config.scheduler.type, logs, self.fail)
        setup = WorkerSetup(
            rollout=config.rollout,
            gconfig=config.gconfig,
            workflow=workflow.pack(),
            eval_workflow=eval_workflow.pack(),
            engine_address="",
            tokenizer_path=str(tokenizer),
            max_positions=max_positions(model),
            reward_fn=config.reward_fn,
            proxy=config.proxy,
        )
        try:
            self._engine, self._workers = self._wait(
                self._processes.start(config.rollout, model, setup, engine_threads)
            )
        except BaseException:
            self.close()
            raise

    def begin(self, tasks: TaskStream, admission: Admission, keep: Filter | None) -> None:
        """Make the pipeline; episodes start with the first `publish`."""
        rollout = self._config.rollout

        async def make() -> Pipeline:
            return Pipeline(
                self._workers,
                admission,
                tasks,
                n_samples=self._config.gconfig.n_samples,
                max_idle_rejections=rollout.max_idle_rejections,
                keep=keep,
                group_seconds=rollout.turns * (rollout.agent.timeout_seconds + GROUP_GRACE_SECONDS),
            )

        self._pipeline = self._loop.run(make())
        if self._failure is not None:
            self._pipeline.fail(self._failure)

    def take(self, count: int) -> list[GroupResult]:
        """The next `count` finished groups; waits for them."""
        return self._wait(self._running.take(count))

    def pop_rejected(self) -> list[int]:
        """Numbers of the tasks, since the last call, that nothing will come of."""

        async def pop() -> list[int]:
            return self._running.pop_rejected()

        return self._wait(pop())

    def evaluate(self, tasks: Sequence[dict[str, Any]], *, greedy: bool) -> list[GroupResult]:
        room = self._config.rollout.max_concurrent_rollouts
        return self._wait(self._running.evaluate(tasks, greedy=greedy, max_running=room))

    def publish(self, update: WeightUpdate) -> None:
        """Give the engine new weights, then let admission know."""

        async def publish() -> None:
            await self._engine.update_weights(update)
            self._running.publish(update.version, update.digest)

        self._wait(publish())

    @property
    def tally(self) -> Tally:
        return self._running.tally

    @property
    def stalls(self) -> list[str]:
        """What blocked the rollout workers' event loops, a sentence per line of code."""
        return self._running.stalls.summary()

    def cpu_seconds(self) -> dict[str, float]:
        return self._wait(self._processes.cpu_seconds())

    def engine_activity(self) -> list[tuple[float, float]]:
        return self._wait(self._engine.activity())

    def engine_pauses(self) -> list[float]:
        """For how long each published version held up generation."""
        return self._wait(self._engine.pauses())

    def fail(self, error: Exception) -> None:
        """Whoever waits here gets this error. Runs on the loop."""
        self._failure = self._failure or error
        self._failed.set()
        if self._pipeline is not None:
            self._pipeline.fail(self._failure)

    def soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop; safe in a signal handler."""
        self._loop.call(function)

    def close(self) -> None:
        try:
            if self._pipeline is not None:
                self._loop.run(self._pipeline.aclose())
        finally:
            self._loop.run(self._processes.close())
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(work)
        except (ArealError, ExceptionGroup) as error:
            raise self._loop.run(self._cause(error)) from error

    async def _cause(self, error: Exception) -> Exception:
        """The failure behind `error`: a process that died, or the user who asked to stop, if it was that."""
        if isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, (ChannelClosed, EngineError)):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), CAUSE_SECONDS)
        return self._failure or error

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "begin() comes first"
        return self._pipeline
