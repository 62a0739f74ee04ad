"""The asynchronous half of a run behind synchronous calls: engine, rollout workers and the pipeline between them.

The trainer's thread computes; everything here lives on an event loop in a thread of its own. A process that dies makes
every waiting call raise what died.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.api.engine_api import WeightUpdate
from areal.api.messages import GroupResult
from areal.config.experiment import PPOConfig
from areal.engine.architecture import read_architecture
from areal.infra.loop_thread import LoopThread
from areal.rollout.admission import Admission
from areal.rollout.pipeline import Filter, Pipeline, Tally, TaskStream
from areal.rollout.worker import WorkerSetup
from areal.rollout.workflows import WorkflowSpec
from areal.trainer.processes import Processes


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
        self._failure: BaseException | None = None
        self._pipeline: Pipeline | None = None
        self._processes = Processes(config.scheduler.type, logs, self.fail)
        setup = WorkerSetup(
            rollout=config.rollout,
            gconfig=config.gconfig,
            workflow=workflow.pack(),
            eval_workflow=eval_workflow.pack(),
            engine_address="",
            tokenizer_path=str(tokenizer),
            max_positions=read_architecture(model).max_positions,
            reward_fn=config.reward_fn,
        )
        try:
            self._engine, self._workers = self._loop.run(
                self._processes.start(config.rollout, model, setup, engine_threads)
            )
        except BaseException:
            self.close()
            raise

    def begin(self, tasks: TaskStream, admission: Admission, keep: Filter | None) -> None:
        """Make the pipeline; episodes start with the first `publish`."""

        async def make() -> Pipeline:
            return Pipeline(
                self._workers,
                admission,
                tasks,
                n_samples=self._config.gconfig.n_samples,
                max_idle_rejections=self._config.rollout.max_idle_rejections,
                keep=keep,
            )

        self._pipeline = self._loop.run(make())
        if self._failure is not None:
            self._pipeline.fail(self._failure)

    def take(self, count: int) -> list[GroupResult]:
        """The next `count` finished groups; waits for them."""
        return self._loop.run(self._running.take(count))

    def evaluate(self, tasks: Sequence[dict[str, Any]], *, greedy: bool) -> list[GroupResult]:
        room = self._config.rollout.max_concurrent_rollouts
        return self._loop.run(self._running.evaluate(tasks, greedy=greedy, max_running=room))

    def publish(self, update: WeightUpdate) -> None:
        """Give the engine new weights, then let admission know."""

        async def publish() -> None:
            await self._engine.update_weights(update)
            self._running.publish(update.version, update.digest)

        self._loop.run(publish())

    @property
    def tally(self) -> Tally:
        return self._running.tally

    def cpu_seconds(self) -> dict[str, float]:
        return self._loop.run(self._processes.cpu_seconds())

    def engine_activity(self) -> list[tuple[float, float]]:
        return self._loop.run(self._engine.activity())

    def fail(self, error: BaseException) -> None:
        """Whoever waits here gets this error. Runs on the loop."""
        self._failure = self._failure or error
        if self._pipeline is not None:
            self._pipeline.fail(self._failure)

    def fail_soon(self, error: BaseException) -> None:
        """The same from any thread or signal handler."""
        self._loop.call(self.fail, error)

    def close(self) -> None:
        if self._pipeline is not None:
            self._loop.run(self._pipeline.aclose())
        self._loop.run(self._processes.close())
        self._loop.close()

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "begin() comes first"
        return self._pipeline
