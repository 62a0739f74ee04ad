"""Runs groups of episodes: workflows, the proxy that agents talk through, and the engine behind it.

The same object serves inside the driver (`rollout.in_process`) and as a process of its own:
`python -m areal.rollout.worker INDEX`, which is set up by the driver and ends when the driver hangs up.
"""

import asyncio
import gc
import pickle
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from areal.api.engine_api import InferenceEngine
from areal.api.messages import Episode, GroupResult, GroupTask, Rejection
from areal.config.generation import GenerationHyperparameters
from areal.config.proxy import ProxyConfig
from areal.config.rollout import RolloutConfig
from areal.engine.remote import RemoteEngine
from areal.infra import workflow_context
from areal.infra.api_wire import api_wire
from areal.infra.channel import Handler
from areal.infra.dial_home import dial_home
from areal.infra.endpoint import connect
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import NO_SESSION_KEY, Proxy
from areal.rollout.agent_door import AgentDoor
from areal.rollout.agent_process import AgentParcel
from areal.rollout.client_environment import environment
from areal.rollout.constructor import Fillers
from areal.rollout.episodes import Digests, Door, run_episode
from areal.rollout.naming import name_of
from areal.rollout.online_door import OnlineDoor
from areal.rollout.stalls import WorkerStalls
from areal.rollout.subproc_door import AgentPool, SubprocDoor
from areal.rollout.workflow_door import WorkflowDoor
from areal.rollout.workflows import WorkflowSpec, is_agent, is_rollout_workflow, load
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer

ROLE = "rollout worker"


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker needs to know. Travels pickled, because workflows are the user's objects."""

    rollout: RolloutConfig
    gconfig: GenerationHyperparameters
    workflow: bytes
    eval_workflow: bytes
    """Empty, or the same bytes: the very object that trains evaluates too."""
    engine_address: str
    tokenizer_path: str
    max_positions: int
    reward_fn: str
    proxy: ProxyConfig = field(default_factory=ProxyConfig)


class RolloutWorker:
    def __init__(self, doors: dict[bool, Door], proxy: Proxy, engine: InferenceEngine, timeout_seconds: float) -> None:
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
) -> dict[bool, Door]:
    gconfig, agent = fillers.gconfig, setup.rollout.agent
    pool: AgentPool | None = None
    if agent.mode == "subproc":
        pool = AgentPool(agent.subproc_max_workers)
        held.push_async_callback(pool.aclose)

    async def door(packed: bytes, online: bool = False) -> Door:
        spec = WorkflowSpec.unpack(packed)
        if online and is_agent(spec):
            outside = OnlineDoor(name_of(spec.target), proxy, agent, gconfig)
            outside.announce(with_key=not setup.proxy.admin_key)
            return outside
        if pool is not None and is_agent(spec):
            path = setup.tokenizer_path
            afar = replace(fillers, tokenizer=path, processor=None if fillers.processor is None else path)
            parcel = AgentParcel(packed, afar)
            away = SubprocDoor(name_of(spec.target), parcel, pool, proxy, agent, gconfig)
            await away.prepare()
            return away
        workflow = load(spec, fillers)
        if is_rollout_workflow(workflow):
            return WorkflowDoor(workflow, engine, fillers.tokenizer)
        return AgentDoor(workflow, proxy, agent, gconfig)

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
    home = await dial_home(ROLE, index, handlers=handlers, wire=api_wire())
    await home.closed
    if worker is not None:
        await worker.aclose()


if __name__ == "__main__":
    asyncio.run(serve_worker(int(sys.argv[1])))
