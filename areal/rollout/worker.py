"""Runs groups of episodes: workflows, the proxy that agents talk through, and the engine behind it.

The same object serves inside the driver (`rollout.in_process`) and as a process of its own:
`python -m areal.rollout.worker INDEX`, which is set up by the driver and ends when the driver hangs up.
"""

import asyncio
import gc
import os
import pickle
import sys
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle

from areal.api.errors import WorkflowError
from areal.api.messages import Episode, GroupResult, GroupTask
from areal.config.generation import GenerationHyperparameters
from areal.config.rollout import RolloutConfig
from areal.engine.remote import RemoteEngine
from areal.infra import workflow_context
from areal.infra.api_wire import api_wire
from areal.infra.channel import Handler
from areal.infra.dial_home import dial_home
from areal.infra.endpoint import connect
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import NO_SESSION_KEY, Proxy
from areal.rollout.episodes import AgentDoor, Door, WorkflowDoor, run_episode
from areal.rollout.workflows import Fillers, WorkflowSpec, is_rollout_workflow, load, name_of
from areal.utils.hf_utils import load_hf_tokenizer

ROLE = "rollout worker"


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker needs to know. Travels pickled, because workflows are the user's objects."""

    rollout: RolloutConfig
    gconfig: GenerationHyperparameters
    workflow: bytes
    eval_workflow: bytes
    engine_address: str
    tokenizer_path: str
    max_positions: int
    reward_fn: str


class RolloutWorker:
    def __init__(self, doors: dict[bool, Door], proxy: Proxy, engine: RemoteEngine, timeout_seconds: float) -> None:
        self._doors = doors
        """By `is_eval`."""
        self._proxy = proxy
        self._engine = engine
        self._timeout_seconds = timeout_seconds

    @classmethod
    async def start(cls, setup: WorkerSetup) -> "RolloutWorker":
        tokenizer = load_hf_tokenizer(setup.tokenizer_path)
        engine = RemoteEngine(await connect(setup.engine_address, wire=api_wire(), peer="the engine"))
        gconfig = setup.gconfig.new(n_samples=1)
        proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=setup.max_positions)
        await proxy.start()
        fillers = Fillers(gconfig, tokenizer, setup.reward_fn)

        def door(packed: bytes) -> Door:
            workflow = _load(packed, fillers)
            if is_rollout_workflow(workflow):
                return WorkflowDoor(workflow, engine, tokenizer)
            return AgentDoor(workflow, proxy, setup.rollout.agent, gconfig)

        train = door(setup.workflow)
        doors = {False: train, True: train if setup.eval_workflow == setup.workflow else door(setup.eval_workflow)}
        return cls(doors, proxy, engine, setup.rollout.agent.timeout_seconds)

    @property
    def origin(self) -> str:
        return self._proxy.origin

    async def run_group(self, task: GroupTask) -> GroupResult:
        """Every sample of a task. One that fails leaves its siblings alone; a cancelled group leaves none running."""
        context = WorkflowContext(is_eval=task.is_eval, task_id=task.task_id)
        door = self._doors[task.is_eval]
        async with asyncio.TaskGroup() as group:
            samples = [
                group.create_task(
                    run_episode(door, pickle.loads(task.data), context, task.greedy, self._timeout_seconds)
                )
                for _ in range(task.n_samples)
            ]
        result = GroupResult(task.task_id, [], [], {})
        for sample in samples:
            outcome, digests = sample.result()
            result.digests |= digests
            if isinstance(outcome, Episode):
                result.episodes.append(outcome)
            else:
                result.rejections.append(outcome)
        return result

    async def aclose(self) -> None:
        await self._proxy.aclose()
        await workflow_context.close_clients()
        await self._engine.aclose()


def _load(packed: bytes, fillers: Fillers) -> Any:
    spec: WorkflowSpec = cloudpickle.loads(packed)
    try:
        return load(spec, fillers)
    except WorkflowError:
        raise
    except Exception as error:
        raise WorkflowError(f"{name_of(spec.target)} could not be made: {type(error).__name__}: {error}") from error


async def serve_worker(index: int) -> None:
    """The process: dial home, be set up, run groups until the driver hangs up."""
    worker: RolloutWorker | None = None

    async def setup(packed: bytes) -> None:
        nonlocal worker
        worker = await RolloutWorker.start(pickle.loads(packed))
        # A client made without a session's address must not reach the internet by accident.
        os.environ.update(OPENAI_BASE_URL=f"{worker.origin}/v1", OPENAI_API_KEY=NO_SESSION_KEY)
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
