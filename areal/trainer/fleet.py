"""The asynchronous half of a run: the engine, the rollout workers and the pipeline between them.

The trainer's thread computes and calls `Fleet`, which is synchronous; everything else here lives on an event loop in a
thread of its own (`_LoopThread`). `_Processes` starts the engine server and the workers, watches them and ends them. In
`rollout.in_process` mode the worker is an object on that event loop instead of a process.

Invariant: when a process dies, every waiting call raises what died, not the broken connection that its death caused.
"""

import asyncio
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, EngineError, ProcessDied
from areal.api.messages import ENGINE_ROLE, WORKER_ROLE, GroupResult, GroupTask, WorkerSetup
from areal.config.experiment import PPOConfig
from areal.config.rollout import RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.inference.remote import RemoteEngine
from areal.engine.model.weights import shared_memory
from areal.engine.models import max_positions
from areal.infra.rpc.channel import Channel, ChannelClosed
from areal.infra.rpc.connect import DriverListener
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, Placement, make_scheduler
from areal.rollout.admission import Admission
from areal.rollout.dispatch import GroupWorker
from areal.rollout.loading import WorkflowSpec
from areal.rollout.pipeline import Filter, Pipeline, Rejections, TaskStream
from areal.utils.closing import Closing

T = TypeVar("T")

START_SECONDS = 120.0
SETUP_SECONDS = 300.0
"""A workflow's constructor may load a lot."""
ASK_SECONDS = 10.0
CAUSE_SECONDS = 2.0
"""A broken connection is noticed before the death that broke it; how long to wait for the better explanation."""
GROUP_GRACE_SECONDS = 60.0
"""Beyond an episode's own deadline: until then a worker may be busy, after that it is stuck."""
CLOSE_SECONDS = 10.0


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
    ) -> None:
        """Start every process; raises at once if one cannot start."""
        self._config = config
        self._loop = _LoopThread()
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._pipeline: Pipeline | None = None
        self._processes = _Processes(config.scheduler, logs, self.fail)
        try:
            setup = WorkerSetup(
                rollout=config.rollout,
                gconfig=config.gconfig,
                workflow=workflow.pack(),
                eval_workflow=eval_workflow.pack(),
                engine_address="",
                tokenizer_path=str(tokenizer),
                max_positions=max_positions(model),
                reward_fn=config.reward_fn,
                proxy=config.proxy.with_key(),
                seed=config.seed,
            )
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
                group_seconds=rollout.rounds * (rollout.agent.timeout_seconds + GROUP_GRACE_SECONDS),
            )

        self._pipeline = self._loop.run(make())
        if self._failure is not None:
            self._pipeline.fail(self._failure)

    def take(self, count: int) -> list[GroupResult]:
        """The next `count` finished groups; waits for them."""
        return self._wait(self._running.take(count))

    def pop_rejected(self) -> list[int]:
        """Numbers of the tasks that were rejected since the last call."""

        async def pop() -> list[int]:
            return self._running.pop_rejected()

        return self._wait(pop())

    def evaluate(self, tasks: Sequence[dict[str, Any]], *, greedy: bool) -> list[GroupResult]:
        max_running = self._config.rollout.max_concurrent_rollouts
        return self._wait(self._running.evaluate(tasks, greedy=greedy, max_running=max_running))

    def publish(self, update: WeightUpdate) -> None:
        """Give the engine new weights, then let admission know."""

        async def publish() -> None:
            await self._engine.update_weights(update)
            self._running.publish(update.version, update.digest)

        self._wait(publish())

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

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of every process so far."""
        return self._wait(self._processes.cpu_seconds())

    def engine_activity(self) -> list[tuple[float, float]]:
        """When the engine was generating, as (start, end)."""
        return self._wait(self._engine.activity())

    def engine_pauses(self) -> list[float]:
        """For how long each published version held up generation."""
        return self._wait(self._engine.pauses())

    def fail(self, error: Exception) -> None:
        """Make every waiting call raise this error. Call it on the event loop."""
        self._failure = self._failure or error
        self._failed.set()
        if self._pipeline is not None:
            self._pipeline.fail(self._failure)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call `function` on the event loop, without waiting; safe in a signal handler."""
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
        except TimeoutError as error:
            raise self._loop.run(self._cause(EngineError(str(error)))) from error
        except (ArealError, ExceptionGroup) as error:
            raise self._loop.run(self._cause(error)) from error

    async def _cause(self, error: Exception) -> Exception:
        """What `error` follows from: a process that died, or Ctrl-C, if it was one of them."""
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


class _Processes:
    """The engine server and the rollout workers. One that ends before `close` is reported to `on_death` at once."""

    def __init__(self, config: SchedulerConfig, logs: Path, on_death: Callable[[ProcessDied], None]) -> None:
        self._config = config
        self._scheduler = make_scheduler(config.type)
        self._logs = logs
        self._on_death = on_death
        self._listener = DriverListener(api_wire())
        self.shared_memory = self._scheduler.scratch(shared_memory())
        """A directory for the weights that the engine maps."""
        self._sockets = self._scheduler.scratch(Path(tempfile.gettempdir()))
        self._channels: dict[str, Channel] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._local = AsyncExitStack()
        """Closes the worker that runs inside the driver, if there is one."""
        self._closing = False

    async def start(
        self, rollout: RolloutConfig, model: Path, setup: WorkerSetup, engine_threads: int
    ) -> tuple[RemoteEngine, list[GroupWorker]]:
        """Start all of them at once; the workers are set up as soon as the engine has an address."""
        await self._listener.open()
        indices = range(0 if rollout.in_process else rollout.num_workers)
        (engine, address), channels = await asyncio.gather(
            self._start_engine(model, rollout.dtype, engine_threads),
            asyncio.gather(*(self._start_worker(index) for index in indices)),
        )
        setup = replace(setup, engine_address=address)
        if rollout.in_process:
            from areal.rollout.worker import RolloutWorker  # else it runs in processes of its own

            worker = await RolloutWorker.start(setup)
            self._local.push_async_callback(worker.aclose)
            return engine, [worker]
        packed = pickle.dumps(setup)
        await asyncio.gather(*(each.call("setup", packed, timeout_seconds=SETUP_SECONDS) for each in channels))
        return engine, [_RemoteWorker(each) for each in channels]

    async def cpu_seconds(self) -> dict[str, float]:
        used = {"driver": time.process_time()}
        for name, channel in sorted(self._channels.items()):
            used[name] = await channel.call("cpu_seconds", timeout_seconds=ASK_SECONDS)
        return used

    async def close(self) -> None:
        self._closing = True
        for watcher in self._watchers:
            watcher.cancel()
        await self._local.aclose()
        await self._listener.close()
        await self._scheduler.close()

    async def _start_engine(self, model: Path, dtype: str, threads: int) -> tuple[RemoteEngine, str]:
        """The driver's handle on the engine, and the address at which workers reach it."""
        env = {"OMP_NUM_THREADS": str(threads)}
        module = ["areal.engine.inference.server", str(model), dtype, str(self._sockets)]
        placement = await self._start(ENGINE_ROLE, module, env)
        arrival = await self._listener.expect(ENGINE_ROLE, 0, placement, timeout_seconds=START_SECONDS)
        self._watch(ENGINE_ROLE, placement, arrival.channel)
        return RemoteEngine(arrival.channel), arrival.info["address"]

    async def _start_worker(self, index: int) -> Channel:
        name = f"{WORKER_ROLE} {index}"
        # One thread: episodes wait for the engine, and what they compute themselves must not crowd it out.
        placement = await self._start(name, ["areal.rollout.worker", str(index)], {"OMP_NUM_THREADS": "1"})
        arrival = await self._listener.expect(WORKER_ROLE, index, placement, timeout_seconds=START_SECONDS)
        self._watch(name, placement, arrival.channel)
        return arrival.channel

    async def _start(self, name: str, module: list[str], env: dict[str, str]) -> Placement:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        env = {"PYTHONPATH": path, **env, **self._listener.env}
        log = self._logs / f"{name.replace(' ', '-')}.log"
        argv = [sys.executable, "-m", *module]
        command = Command(name, argv, log, env, self._config.heartbeat_seconds, self._listener.secret)
        return await self._scheduler.start(command)

    def _watch(self, name: str, placement: Placement, channel: Channel) -> None:
        self._channels[name] = channel
        self._watchers.append(asyncio.ensure_future(self._until_death(placement)))

    async def _until_death(self, placement: Placement) -> None:
        await placement.wait()
        if not self._closing:
            self._on_death(ProcessDied(placement.describe_exit()))


@dataclass
class _RemoteWorker:
    """A rollout worker in another process."""

    channel: Channel

    async def run_group(self, task: GroupTask) -> GroupResult:
        result: GroupResult = await self.channel.call("run_group", task, timeout_seconds=None)
        return result


class _LoopThread:
    """An event loop in a thread of its own, for synchronous code that owns asynchronous parts."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="areal event loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it here; an interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function` there soon, without waiting; safe in a signal handler."""
        self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel what is left and end the thread."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop).result(CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
