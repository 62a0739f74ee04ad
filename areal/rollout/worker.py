"""Runs groups of episodes: holds the workflows, the proxy that agents talk through, and connections to the engines.

The same object serves inside the driver (`rollout.in_process`) and as a process of its own:
`python -m areal.rollout.worker INDEX` connects to the driver, is set up by it, runs the groups it is sent, and ends
when the driver closes the connection.
"""

import asyncio
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from areal.api.engine_api import InferenceEngine
from areal.api.errors import GroupLost, WeightMismatch
from areal.api.io_struct import add_digests
from areal.api.messages import (
    WORKER_ROLE,
    Doing,
    EngineAddress,
    Episode,
    GroupResult,
    GroupTask,
    Rejection,
    Stall,
    WorkerSetup,
)
from areal.engine.inference.group import EngineConnections, EngineGroup
from areal.infra import workflow_context
from areal.infra.rpc.channel import Channel, Handler
from areal.infra.rpc.connect import connect_to_driver, read_secret
from areal.infra.rpc.shipping import local_model
from areal.infra.rpc.status import start_answering
from areal.infra.rpc.wire import api_wire
from areal.infra.stalls import StallLog, StallWatch
from areal.infra.status import doing_of, together
from areal.infra.tracing import Tracing
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import NO_SESSION_KEY, Proxy
from areal.rollout.dispatch import GroupWorker
from areal.rollout.episodes import Digests, Runner, call, run_episode
from areal.rollout.loading import Fillers
from areal.rollout.runners import AgentPool, RunnerParts, make_runner
from areal.rollout.runners.agent import environment
from areal.trajectory.tensors import RowLimits
from areal.utils import garbage, waits
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer
from areal.utils.seeds import derived_seed
from areal.utils.waits import Waits


async def serve_worker(index: int) -> None:
    """The process's whole life."""
    secret = read_secret()
    worker: RolloutWorker | None = None
    loop = asyncio.get_running_loop()
    driver: asyncio.Future[Channel] = loop.create_future()
    asked_to_end: asyncio.Future[None] = loop.create_future()

    async def setup(packed: bytes) -> None:
        nonlocal worker
        setup: WorkerSetup = pickle.loads(packed)
        tokenizer = await local_model(await driver, Path(setup.tokenizer_path))
        worker = await RolloutWorker.start(replace(setup, tokenizer_path=str(tokenizer)), secret, on_engine_lost)
        garbage.settle()
        if setup.rollout.tracing:  # the last spans are sent at the end; otherwise nothing is lost if it ends at once
            loop.add_signal_handler(signal.SIGTERM, asked_to_end.cancel)

    async def run_group(task: GroupTask) -> GroupResult:
        assert worker is not None, "setup comes first"
        return await worker.run_group(task)

    async def follow(engines: list[EngineAddress]) -> None:
        assert worker is not None, "setup comes first"
        await worker.follow(engines)

    async def unasked_groups() -> list[int]:
        return [] if worker is None else await worker.unasked_groups()

    def on_engine_lost(address: EngineAddress) -> None:
        if driver.result().is_open:
            driver.result().notify("engine_lost", address)

    handlers: dict[str, Handler] = {
        "setup": setup,
        "run_group": run_group,
        "follow": follow,
        "unasked_groups": unasked_groups,
        "cpu_seconds": time.process_time,
    }

    async def doing() -> list[Doing]:
        return [] if worker is None else await worker.doing()

    start_answering(secret, doing, lambda: None if worker is None else worker.blocked_seconds)
    connected = await connect_to_driver(WORKER_ROLE, index, handlers=handlers, wire=api_wire(), secret=secret)
    driver.set_result(connected)
    await asyncio.wait((connected.closed, asked_to_end), return_when=asyncio.FIRST_COMPLETED)
    if worker is not None:
        await worker.aclose()


class RolloutWorker(GroupWorker):
    def __init__(
        self,
        runners: dict[bool, Runner],
        proxy: Proxy,
        engine: InferenceEngine,
        timeout_seconds: float,
        seed: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`runners` by `is_eval`; `seed` is the run's; `tracing` None = episodes have no spans."""
        self.proxy = proxy
        self._runners = runners
        self._engines = engine if isinstance(engine, EngineGroup) else None
        """The engines, if they are in processes that may end before the worker does."""
        self._connections: EngineConnections | None = None
        self._timeout_seconds = timeout_seconds
        self._seed = seed
        self._episodes: dict[Waits, str] = {}
        """What each that runs waits for, and what people call it."""
        self._groups: dict[int, list[Waits]] = {}
        """The samples of each training group that runs, by its task."""
        self._tracing = tracing
        self._stall_watch: StallWatch | None = None
        self._ended_stalls: deque[Stall] = deque()
        """Since the last group ended; a thread appends to it."""
        self._closing = AsyncExitStack()
        if tracing is not None:  # after everything that may still end a span
            self._closing.push_async_callback(tracing.aclose)
        self._closing.push_async_callback(engine.aclose)
        self._closing.push_async_callback(workflow_context.close_clients)
        self._closing.push_async_callback(proxy.aclose)

    @classmethod
    async def start(
        cls,
        setup: WorkerSetup,
        run_secret: bytes = b"",
        on_engine_lost: Callable[[EngineAddress], None] = lambda address: None,
    ) -> "RolloutWorker":
        """Connect, listen, and construct the workflows; what is open is closed again if one of these fails.

        `run_secret` opens the engines of the run; `on_engine_lost` is told of one that does not answer any more.
        """
        tokenizer = load_hf_tokenizer(setup.tokenizer_path)
        processor = load_hf_processor(setup.tokenizer_path)
        engine = EngineGroup()
        gconfig = setup.gconfig.new(n_samples=1)
        proxy = Proxy(
            engine,
            tokenizer,
            gconfig=gconfig,
            max_positions=setup.max_positions,
            limits=setup.proxy.limits,
            drop_params=setup.proxy.drop_params,
            tool_parser=setup.proxy.tool_parser,
            reasoning_parser=setup.proxy.reasoning_parser,
            processor=processor,
            admin_key=setup.proxy.admin_key or None,
            self_reward=setup.rollout.agent.self_reward,
            public_url=setup.proxy.public_url,
        )
        spans = Tracing.start() if setup.rollout.tracing else None
        worker = cls({}, proxy, engine, setup.rollout.agent.timeout_seconds, setup.seed, spans)
        worker._connections = EngineConnections(engine, run_secret, on_engine_lost)
        worker._closing.push_async_callback(worker._connections.follow, ())  # nothing is lost when it ends
        try:
            await worker.follow(setup.engines)
            # The config has checked that the host is loopback, or that the user chose the admin key.
            await proxy.start(setup.proxy.host, setup.proxy.port, exposed=True)
            # A client made without a session's address must not reach the internet by accident.
            no_session = {"OPENAI_BASE_URL": f"{proxy.origin}/v1", "OPENAI_API_KEY": NO_SESSION_KEY}
            worker._closing.enter_context(environment(no_session))
            fillers = Fillers(gconfig, tokenizer, setup.reward_fn, processor)
            worker._runners = await worker._make_runners(setup, engine, fillers)
            if setup.rollout.stall_seconds is not None:  # after the constructors, which may block
                worker._watch_stalls(setup.rollout.stall_seconds)
        except BaseException:
            await worker.aclose()
            raise
        return worker

    async def run_group(self, task: GroupTask) -> GroupResult:
        """Every sample of a task. One that fails leaves the others alone; a cancelled group leaves none running.

        Raises GroupLost if there was no engine for a while and samples failed: that is no fault of theirs.
        """
        outages = 0
        if self._engines is not None:
            await self._engines.until_serving()
            outages = self._engines.outages
        each = [Waits() for _ in range(task.n_samples)]
        with self._running(task, each):
            async with asyncio.TaskGroup() as group:
                samples = [group.create_task(self._run_sample(task, n, own)) for n, own in enumerate(each)]
        result = GroupResult(task.task_id, [], [], {})
        for sample in samples:
            outcome, digests = sample.result()
            add_digests(result.digests, digests)
            if isinstance(outcome, Episode):
                result.episodes.append(outcome)
            else:
                result.rejections.append(outcome)
        if result.rejections and self._engines is not None and self._engines.outages > outages:
            raise GroupLost(f"there was no engine for a while when the group of task {task.task_id} ran")
        _require_digests(result)
        result.stalls = [self._ended_stalls.popleft() for _ in range(len(self._ended_stalls))]
        return result

    async def unasked_groups(self) -> list[int]:
        return [task for task, samples in self._groups.items() if not any(sample.asked_model for sample in samples)]

    @contextmanager
    def _running(self, task: GroupTask, samples: list[Waits]) -> Iterator[None]:
        """An evaluation does not grow old."""
        if task.is_eval:
            yield
            return
        self._groups[task.task_id] = samples
        try:
            yield
        finally:
            del self._groups[task.task_id]

    async def follow(self, engines: Sequence[EngineAddress]) -> None:
        """These engines serve from now on, and no others."""
        assert self._connections is not None, "only a worker that was started has engines elsewhere"
        await self._connections.follow(engines)

    async def doing(self) -> list[Doing]:
        """What its episodes do: one line for all that do the same."""
        doings = [doing_of(name, waits) or Doing(name, "is being read") for waits, name in self._episodes.items()]
        return together(doings) + ([] if self._engines is None else [Doing("it", self._asked_for(self._engines))])

    def _asked_for(self, engines: EngineGroup) -> str:
        asked = [
            f"{count} answer{'s' * (count != 1)} of {name.partition(' #')[0]}"
            for name, count in engines.in_flight.items()
        ]
        return f"waits for {' and '.join(asked)}" if asked else "knows no engine that serves"

    @property
    def blocked_seconds(self) -> float | None:
        """For how long its event loop has been blocked; None = it is not, or nobody watches it."""
        return None if self._stall_watch is None else self._stall_watch.blocked_seconds

    async def aclose(self) -> None:
        await self._closing.aclose()

    async def _run_sample(self, task: GroupTask, number: int, own: Waits) -> tuple[Episode | Rejection, Digests]:
        """Each sample has its own copy of the task, which its agent may change, and its own seed."""
        runner, data = self._runners[task.is_eval], pickle.loads(task.data)
        kind, seed = "evaluate" if task.is_eval else "train", self._seed
        context = WorkflowContext(
            is_eval=task.is_eval,
            task_id=task.task_id,
            workflow=runner.name,
            seed=None if seed is None else derived_seed(seed, kind, task.task_id, number),
        )
        kind = "evaluation task" if task.is_eval else "task"
        with waits.of(own):
            sample = f", sample {number + 1} of {task.n_samples}," if task.n_samples > 1 else ""
            self._episodes[own] = f"{kind} {abs(task.task_id)}{sample}"
            played = run_episode(runner, data, context, greedy=task.greedy, seconds=self._timeout_seconds)
            try:
                if self._tracing is None:
                    return await played
                return await self._tracing.episode(
                    played, agent=runner.name, task_id=task.task_id, sample=number, is_eval=task.is_eval
                )
            finally:
                del self._episodes[own]

    async def _make_runners(self, setup: WorkerSetup, engine: InferenceEngine, fillers: Fillers) -> dict[bool, Runner]:
        agent, pool = setup.rollout.agent, None
        if agent.mode == "subproc":
            pool = AgentPool(agent.subproc_max_workers)
            self._closing.push_async_callback(pool.aclose)
        parts = RunnerParts(
            self.proxy,
            engine,
            agent,
            fillers,
            setup.tokenizer_path,
            pool,
            log_admin_key=not setup.proxy.admin_key,
            limits=RowLimits(setup.vocab_size, setup.max_positions),
        )
        train = await make_runner(setup.workflow, agent.mode, parts)
        if setup.eval_workflow in (b"", setup.workflow):
            return {False: train, True: train}
        # Agents from outside only train; an evaluation with an agent of its own runs it here.
        eval_mode = "inline" if agent.mode == "online" else agent.mode
        return {False: train, True: await make_runner(setup.eval_workflow, eval_mode, parts)}

    def _watch_stalls(self, seconds: float) -> None:
        """Report code that blocks this event loop: at once in the log, the only place that can be reached while it
        blocks, and with the next group to the driver. Code that blocks for an episode's whole time fails its episode.
        """
        log = StallLog()

        def on_end(stall: Stall) -> None:
            self._ended_stalls.append(stall)  # first: whoever reads of it in the log may ask for it
            log.end(stall)

        watch = StallWatch(seconds, log.begin, on_end, limit_seconds=self._timeout_seconds, entries=(call.__code__,))
        watch.start()
        self._stall_watch = watch
        self._closing.callback(watch.close)


def _require_digests(result: GroupResult) -> None:
    """The driver compares what engines say of their weights, so it must be there for every token that may be trained.

    Raises WeightMismatch.
    """
    rows = (row for episode in result.episodes for row in episode.rows)
    sampled = {version for row in rows for version in row.versions[row.loss_mask].tolist()}
    if missing := sorted(sampled - result.digests.keys()):
        raise WeightMismatch(
            f"an engine must tell the digest of every version that it sampled a token with, got none of {missing} for "
            f"the group of task {result.task_id}"
        )


if __name__ == "__main__":
    asyncio.run(serve_worker(int(sys.argv[1])))
