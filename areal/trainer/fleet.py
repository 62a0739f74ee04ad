"""The asynchronous half of a run: the engine, the rollout workers and the pipeline between them.

The trainer's thread computes and calls `Fleet`, which is synchronous; everything else here lives on an event loop in a
thread of its own (`_LoopThread`). `_Processes` starts the engine server and the workers, watches them and ends them. In
`rollout.in_process` mode the worker is an object on that event loop instead of a process.

A process that dies is started again, within a budget. Episodes that it was needed for run again; an engine gets the
weights of the day before it serves.

Invariant: when a death ends the run, every waiting call raises what died, not the broken connection that it caused.
"""

import asyncio
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, EngineError, GroupLost, ProcessDied
from areal.api.messages import ENGINE_ROLE, WORKER_ROLE, GroupResult, GroupTask, WorkerSetup
from areal.config.experiment import PPOConfig
from areal.config.rollout import RolloutConfig
from areal.config.training import SchedulerConfig
from areal.engine.inference.remote import RemoteEngine
from areal.engine.model.weights import shared_memory
from areal.engine.models import max_positions, vocab_size
from areal.infra.rpc.channel import Channel, ChannelClosed, RemoteError
from areal.infra.rpc.connect import DriverListener
from areal.infra.rpc.wire import api_wire
from areal.infra.scheduler import Command, Placement, make_scheduler
from areal.rollout.admission import Admission
from areal.rollout.dispatch import GroupWorker
from areal.rollout.loading import WorkflowSpec
from areal.rollout.pipeline import Filter, Pipeline, Rejections, TaskStream
from areal.utils.closing import Closing
from areal.utils.logging import getLogger

if TYPE_CHECKING:
    from areal.rollout.worker import RolloutWorker

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
HOUR_SECONDS = 3600.0
logger = getLogger("fleet")


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
                vocab_size=vocab_size(model),
            )
            self._workers = self._wait(self._processes.start(config.rollout, model, setup, engine_threads))
            self._engine = self._processes.engine
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
            await self._processes.publish(update)
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
        self._processes.engine.give_up()
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
    """The engine server and the rollout workers, each started again when it ends before `close`.

    When a role's restarts are used up, or one fails, `on_failure` gets the reason at once.
    """

    def __init__(self, config: SchedulerConfig, logs: Path, on_failure: Callable[[Exception], None]) -> None:
        self._config = config
        self._scheduler = make_scheduler(config.type)
        self._logs = logs
        self._on_failure = on_failure
        self._listener = DriverListener(api_wire())
        self.shared_memory = self._scheduler.scratch(shared_memory())
        """A directory for the weights that the engine maps."""
        self._sockets = self._scheduler.scratch(Path(tempfile.gettempdir()))
        self.engine = RemoteEngine(returns=True)
        self._weights: WeightUpdate | None = None
        """What the engine must have before it serves; None = those of its model's files."""
        self._workers: list[_RemoteWorker] = []
        self._budgets = {role: RestartBudget(config.max_restarts) for role in (ENGINE_ROLE, WORKER_ROLE)}
        self._keepers: list[asyncio.Task[None]] = []
        self._channels: dict[str, Channel] = {}
        self._cpu_seconds: dict[str, float] = {}
        """By process, as far as it is known."""
        self._started_with: dict[str, float] = {}
        """What was used before the present process of that name."""
        self._local: RolloutWorker | None = None
        """The worker that runs inside the driver, if there is one."""

    async def start(
        self, rollout: RolloutConfig, model: Path, setup: WorkerSetup, engine_threads: int
    ) -> list[GroupWorker]:
        """Start all of them at once; the workers are set up as soon as the engine has an address."""
        await self._listener.open()
        self._setup = setup
        self._engine_command = ["areal.engine.inference.server", str(model), rollout.dtype, str(self._sockets)]
        self._engine_threads = engine_threads
        self._workers = [_RemoteWorker() for _ in range(0 if rollout.in_process else rollout.num_workers)]
        roles: list[tuple[str, Spawn, Join]] = [(ENGINE_ROLE, self._spawn_engine, self._join_engine)]
        roles += [
            (WORKER_ROLE, partial(self._spawn_worker, index), partial(self._join_worker, index))
            for index in range(len(self._workers))
        ]
        if rollout.agent.mode == "online" and setup.proxy.port == 0:  # its clients could not find it at a new port
            self._budgets[WORKER_ROLE] = RestartBudget(0)
        placements = await asyncio.gather(*(spawn() for _, spawn, _ in roles))
        await asyncio.gather(*(_joined(join, each) for (_, _, join), each in zip(roles, placements, strict=True)))
        for (role, spawn, join), placement in zip(roles, placements, strict=True):
            self._keepers.append(asyncio.ensure_future(self._keep(role, placement, spawn, join)))
        if not rollout.in_process:
            return [*self._workers]
        from areal.rollout.worker import RolloutWorker  # else it runs in processes of its own

        self._local = await RolloutWorker.start(self._setup)
        return [self._local]

    async def publish(self, update: WeightUpdate) -> None:
        """Give the engine new weights; one that is started again gets them too."""
        self._weights = update
        await self.engine.update_weights(update)

    async def cpu_seconds(self) -> dict[str, float]:
        """What a process used before it died is known as of the last call."""
        for name, channel in sorted(self._channels.items()):
            with suppress(ChannelClosed, TimeoutError):
                since = self._started_with[name]
                self._cpu_seconds[name] = since + await channel.call("cpu_seconds", timeout_seconds=ASK_SECONDS)
        return {"driver": time.process_time(), **self._cpu_seconds}

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._local is not None:
            await self._local.aclose()
        await self._listener.close()
        await self._scheduler.close()

    async def _keep(self, role: str, placement: Placement, spawn: "Spawn", join: "Join") -> None:
        """Start the process again whenever it has ended, as often as the budget of its role allows."""
        while True:
            await placement.wait()
            died = placement.describe_exit()
            if not self._budgets[role].spend():
                self._on_failure(ProcessDied(died + self._why_the_end(role, placement)))
                return
            logger.warning("%s; it is started again, and the groups that it was needed for run again", died)
            try:
                placement = await spawn()
                await _joined(join, placement)
            except Exception as error:
                if placement.returncode is None:
                    self._on_failure(error)
                    return

    def _why_the_end(self, role: str, placement: Placement) -> str:
        limit = self._budgets[role].limit
        why = f"; {limit} restarts within an hour are as many as scheduler.max_restarts allows" if limit else ""
        if role == WORKER_ROLE and (placement.returncode or 0) > 0:
            why += "; an inline agent that ends its process does this, rollout.agent.mode=subproc keeps it apart"
        return why

    async def _spawn_engine(self) -> Placement:
        return await self._spawn(ENGINE_ROLE, self._engine_command, {"OMP_NUM_THREADS": str(self._engine_threads)})

    async def _join_engine(self, placement: Placement) -> None:
        """Wait for the engine, give it the weights of the day, and only then let requests reach it."""
        arrival = await self._listener.expect(ENGINE_ROLE, 0, placement, timeout_seconds=START_SECONDS)
        if self._weights is not None:
            await RemoteEngine(arrival.channel).update_weights(self._weights)
        self._setup = replace(self._setup, engine_address=arrival.info["address"])
        self._keep_channel(ENGINE_ROLE, arrival.channel)
        self.engine.connect(arrival.channel)
        if self._local is not None:
            await self._local.reconnect()
        for worker in self._workers:
            worker.reconnect()

    async def _spawn_worker(self, index: int) -> Placement:
        # One thread: episodes wait for the engine, and what they compute themselves must not crowd it out.
        env = {"OMP_NUM_THREADS": "1"}
        return await self._spawn(f"{WORKER_ROLE} {index}", ["areal.rollout.worker", str(index)], env)

    async def _join_worker(self, index: int, placement: Placement) -> None:
        arrival = await self._listener.expect(WORKER_ROLE, index, placement, timeout_seconds=START_SECONDS)
        while True:
            engine = await self.engine.until_connected()
            try:
                await arrival.channel.call("setup", pickle.dumps(self._setup), timeout_seconds=SETUP_SECONDS)
                break
            except RemoteError:
                if engine.is_open:  # otherwise the worker could not connect to it
                    raise
        self._keep_channel(f"{WORKER_ROLE} {index}", arrival.channel)
        self._workers[index].connect(arrival.channel)
        if self.engine.channel is not engine or not engine.is_open:  # it went after the setup, and may be back already
            self._workers[index].reconnect()

    async def _spawn(self, name: str, module: list[str], env: dict[str, str]) -> Placement:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        env = {"PYTHONPATH": path, **env, **self._listener.env}
        log = self._logs / f"{name.replace(' ', '-')}.log"
        argv = [sys.executable, "-m", *module]
        command = Command(name, argv, log, env, self._config.heartbeat_seconds, self._listener.secret)
        return await self._scheduler.start(command)

    def _keep_channel(self, name: str, channel: Channel) -> None:
        self._channels[name] = channel
        self._started_with[name] = self._cpu_seconds.setdefault(name, 0.0)


Spawn = Callable[[], Awaitable[Placement]]
Join = Callable[[Placement], Awaitable[None]]


async def _joined(join: Join, placement: Placement) -> None:
    """Raises ProcessDied if the process ended meanwhile, not the broken connection that its death caused."""
    try:
        await join(placement)
    except (ChannelClosed, EngineError):
        with suppress(TimeoutError):
            await asyncio.wait_for(placement.wait(), CAUSE_SECONDS)
        if placement.returncode is None:
            raise
        raise ProcessDied(placement.describe_exit()) from None


class RestartBudget:
    """At most `limit` restarts within an hour."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._spent: list[float] = []

    def spend(self) -> bool:
        """Whether one more is allowed; it then counts."""
        now = self._clock()
        self._spent = [each for each in self._spent if now - each < HOUR_SECONDS]
        if len(self._spent) >= self.limit:
            return False
        self._spent.append(now)
        return True


class _RemoteWorker:
    """A rollout worker in another process, and in the one that replaces it."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._connected = asyncio.Event()
        """Set at the next `connect`."""

    def connect(self, channel: Channel) -> None:
        self._channel = channel
        self._connected.set()
        self._connected = asyncio.Event()

    def reconnect(self) -> None:
        """Tell it that the engine is at its address again; one that is being started connects by itself."""
        if self._channel is not None and self._channel.is_open:
            self._channel.notify("reconnect")

    @property
    def present(self) -> bool:
        return self._channel is not None and self._channel.is_open

    async def until_present(self) -> None:
        while not self.present:
            await self._connected.wait()

    async def run_group(self, task: GroupTask) -> GroupResult:
        assert self._channel is not None, "until_present() comes first"
        try:
            result: GroupResult = await self._channel.call("run_group", task, timeout_seconds=None)
        except ChannelClosed as error:
            raise GroupLost(str(error)) from None
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
