"""What a worker tells of episodes that block its event loop: at once in its log, and with its next group to the driver.

The log is the only place that can be reached while the loop is blocked.
"""

# MERGED-DOC
# Runs groups of episodes: workflows, the proxy that agents talk through, and the engine behind it.
#
# The same object serves inside the driver (`rollout.in_process`) and as a process of its own:
# `python -m areal.rollout.worker INDEX`, which is set up by the driver and ends when the driver hangs up.

import asyncio
import gc
import pickle
import sys
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import replace

from areal.api.engine_api import InferenceEngine
from areal.api.messages import WORKER_ROLE, Episode, GroupResult, GroupTask, Rejection, Stall, WorkerSetup
from areal.engine.inference.remote import RemoteEngine
from areal.infra import workflow_context
from areal.infra.rpc.channel import Handler
from areal.infra.rpc.connect import connect, connect_to_driver
from areal.infra.rpc.wire import api_wire
from areal.infra.stalls import StallBook, StallWatch, over, so_far
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import NO_SESSION_KEY, Proxy
from areal.rollout.episodes import Digests, Runner, call, run_episode
from areal.rollout.loading import Fillers, WorkflowSpec, is_agent, is_rollout_workflow, load
from areal.rollout.runners.agent import AgentRunner, environment
from areal.rollout.runners.online import OnlineRunner
from areal.rollout.runners.subprocess import AgentParcel, AgentPool, SubprocessRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.utils.callables import name_of
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer
from areal.utils.logging import getLogger

logger = getLogger("rollout")


class WorkerStalls:
    def __init__(self, seconds: float, limit_seconds: float | None = None) -> None:
        """Watches the event loop of the calling thread; `seconds` is `rollout.stall_seconds`.

        Code that blocks it for `limit_seconds`, an episode's whole time, fails its episode.
        """
        self._book = StallBook()
        self._told = False
        self._ended: deque[Stall] = deque()
        self._watch = StallWatch(seconds, self._begin, self._end, limit_seconds=limit_seconds, entries=(call.__code__,))
        self._watch.start()

    def take(self) -> list[Stall]:
        """Those that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        self._watch.close()

    def _begin(self, stall: Stall) -> None:
        self._told = self._book.is_news(stall)
        if self._told:
            logger.warning("%s", so_far(stall))

    def _end(self, stall: Stall) -> None:
        self._book.add(stall)
        self._ended.append(stall)
        if self._told:
            logger.warning("%s", over(stall))


class RolloutWorker:
    def __init__(
        self, doors: dict[bool, Runner], proxy: Proxy, engine: InferenceEngine, timeout_seconds: float
    ) -> None:
        self._doors = doors
        """By `is_eval`."""
        self._proxy = proxy
        self._timeout_seconds = timeout_seconds
        self._stalls: WorkerStalls | None = None
        self._held = AsyncExitStack()
        self._held.push_async_callback(engine.aclose)
        self._held.push_async_callback(workflow_context.close_clients)
        self._held.push_async_callback(proxy.aclose)

    @classmethod
    async def start(cls, setup: WorkerSetup) -> "RolloutWorker":
        """Connect, listen, and construct the workflows; what is open is closed again if one of these fails."""
        tokenizer = load_hf_tokenizer(setup.tokenizer_path)
        processor = load_hf_processor(setup.tokenizer_path)
        engine = RemoteEngine(await connect(setup.engine_address, wire=api_wire(), peer="the engine"))
        proxy = Proxy(
            engine,
            tokenizer,
            gconfig=setup.gconfig.new(n_samples=1),
            max_positions=setup.max_positions,
            limits=setup.proxy.limits,
            drop_params=setup.proxy.drop_params,
            tool_parser=setup.proxy.tool_parser,
            reasoning_parser=setup.proxy.reasoning_parser,
            processor=processor,
            admin_key=setup.proxy.admin_key or None,
            self_reward=setup.rollout.agent.self_reward,
        )
        fillers = Fillers(setup.gconfig.new(n_samples=1), tokenizer, setup.reward_fn, processor)
        worker = cls({}, proxy, engine, setup.rollout.agent.timeout_seconds)
        try:
            # The config has seen to it that it is loopback, or that the admin key was chosen.
            await proxy.start(setup.proxy.host, setup.proxy.port, exposed=True)
            # A client made without a session's address must not reach the internet by accident.
            nowhere = {"OPENAI_BASE_URL": f"{proxy.origin}/v1", "OPENAI_API_KEY": NO_SESSION_KEY}
            worker._held.enter_context(environment(nowhere))
            worker._doors = await _doors(setup, proxy, engine, fillers, worker._held)
            if setup.rollout.stall_seconds is not None:  # from here on: constructors may take their time
                worker._stalls = WorkerStalls(setup.rollout.stall_seconds, worker._timeout_seconds)
                worker._held.callback(worker._stalls.close)
        except BaseException:
            await worker.aclose()
            raise
        return worker

    async def run_group(self, task: GroupTask) -> GroupResult:
        """Every sample of a task. One that fails leaves its siblings alone; a cancelled group leaves none running."""
        async with asyncio.TaskGroup() as group:
            samples = [group.create_task(self._run_sample(task)) for _ in range(task.n_samples)]
        result = GroupResult(task.task_id, [], [], {})
        for sample in samples:
            outcome, digests = sample.result()
            result.digests |= digests
            if isinstance(outcome, Episode):
                result.episodes.append(outcome)
            else:
                result.rejections.append(outcome)
        if self._stalls is not None:
            result.stalls = self._stalls.take()
        return result

    async def aclose(self) -> None:
        await self._held.aclose()

    async def _run_sample(self, task: GroupTask) -> tuple[Episode | Rejection, Digests]:
        """Each sample has its own copy of the task, which its agent may change."""
        door, data = self._doors[task.is_eval], pickle.loads(task.data)
        context = WorkflowContext(is_eval=task.is_eval, task_id=task.task_id, workflow=door.name)
        return await run_episode(door, data, context, greedy=task.greedy, seconds=self._timeout_seconds)


async def _doors(
    setup: WorkerSetup, proxy: Proxy, engine: InferenceEngine, fillers: Fillers, held: AsyncExitStack
) -> dict[bool, Runner]:
    gconfig, agent = fillers.gconfig, setup.rollout.agent
    pool: AgentPool | None = None
    if agent.mode == "subproc":
        pool = AgentPool(agent.subproc_max_workers)
        held.push_async_callback(pool.aclose)

    async def door(packed: bytes, online: bool = False) -> Runner:
        spec = WorkflowSpec.unpack(packed)
        if online and is_agent(spec):
            outside = OnlineRunner(name_of(spec.target), proxy, agent, gconfig)
            outside.announce(with_key=not setup.proxy.admin_key)
            return outside
        if pool is not None and is_agent(spec):
            path = setup.tokenizer_path
            afar = replace(fillers, tokenizer=path, processor=None if fillers.processor is None else path)
            parcel = AgentParcel(packed, afar)
            away = SubprocessRunner(name_of(spec.target), parcel, pool, proxy, agent, gconfig)
            await away.prepare()
            return away
        workflow = load(spec, fillers)
        if is_rollout_workflow(workflow):
            return WorkflowRunner(workflow, engine, fillers.tokenizer)
        return AgentRunner(workflow, proxy, agent, gconfig)

    train = await door(setup.workflow, online=agent.mode == "online")
    same = setup.eval_workflow in (b"", setup.workflow)
    return {False: train, True: train if same else await door(setup.eval_workflow)}


async def serve_worker(index: int) -> None:
    """The process: dial home, be set up, run groups until the driver hangs up."""
    worker: RolloutWorker | None = None

    async def setup(packed: bytes) -> None:
        nonlocal worker
        worker = await RolloutWorker.start(pickle.loads(packed))
        gc.collect()
        gc.freeze()

    async def run_group(task: GroupTask) -> GroupResult:
        assert worker is not None, "setup comes first"
        return await worker.run_group(task)

    handlers: dict[str, Handler] = {"setup": setup, "run_group": run_group, "cpu_seconds": time.process_time}
    home = await connect_to_driver(WORKER_ROLE, index, handlers=handlers, wire=api_wire())
    await home.closed
    if worker is not None:
        await worker.aclose()


if __name__ == "__main__":
    asyncio.run(serve_worker(int(sys.argv[1])))
