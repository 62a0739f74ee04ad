"""A worker says what each of its episodes does, whatever holds it."""

import asyncio
import pickle
import threading

import httpx
import pytest
from sdk_call import DATA, chat

from areal.api.messages import GroupTask
from areal.api.reward_api import AsyncRewardWrapper
from areal.config.rollout import AgentConfig
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.online import OnlineRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.rollout.worker import RolloutWorker

DEADLINE_SECONDS = 60


@pytest.fixture
async def held(proxy, engine):
    """Runs a group until the test has seen what holds it; returns the lines of the worker meanwhile."""
    groups = []

    def begin(runner, n_samples=2):
        worker = RolloutWorker({False: runner, True: runner}, proxy, engine, 60)
        task = GroupTask(7, pickle.dumps({**DATA, "end": "hang"}), n_samples)
        groups.append(asyncio.create_task(worker.run_group(task)))
        return worker

    yield begin
    for group in groups:
        group.cancel()
    await asyncio.gather(*groups, return_exceptions=True)


async def told(worker, phrase, count=1):
    """What so many of its episodes do, as soon as that is found in it."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            for doing in await worker.doing():
                if phrase in doing.what and doing.count >= count:
                    return doing
            await asyncio.sleep(0)


async def test_agent_that_waits_in_its_own_code_is_named_with_its_line(held, proxy, gconfig):
    async def agent(data, **kwargs):
        await asyncio.Event().wait()

    doing = await told(held(AgentRunner(agent, proxy, AgentConfig(), gconfig)), "test_worker_status.py:")
    assert doing.part.startswith("task 7, sample ")
    assert doing.what.startswith("runs its own code, at ")
    assert doing.what.endswith("in agent")
    assert doing.limit == "rollout.agent.timeout_seconds=60"
    assert doing.left_seconds is not None


async def test_agent_whose_model_gives_no_answer_waits_for_the_model(held, proxy, gconfig, engine):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return 1.0

    await engine.pause()
    doing = await told(held(AgentRunner(agent, proxy, AgentConfig(), gconfig)), "waits for the model", count=2)
    assert doing.limit == "rollout.agent.timeout_seconds=60"
    await engine.resume()


async def test_workflow_whose_engine_gives_no_answer_waits_for_the_model(held, engine, tokenizer, gconfig):
    from areal.api.io_struct import ModelRequest
    from areal.api.workflow_api import RolloutWorkflow

    class Asking(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return await engine.agenerate(ModelRequest("r", [5, 6, 7], gconfig))

    await engine.pause()
    assert await told(held(WorkflowRunner(Asking(), engine, tokenizer)), "waits for the model", count=2)
    await engine.resume()


async def test_reward_function_that_never_returns_is_named(held, proxy, gconfig):
    async def scores(*args, **kwargs):
        await asyncio.Event().wait()

    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return await AsyncRewardWrapper(scores, timeout_seconds=15)()

    doing = await told(held(AgentRunner(agent, proxy, AgentConfig(), gconfig)), "reward function")
    assert doing.what.startswith("waits for its reward function ")
    assert doing.what.endswith("scores")
    assert doing.limit == "its timeout_seconds=15"


async def test_task_that_no_agent_outside_takes_says_so_and_then_what_its_agent_owes(held, proxy, gconfig):
    runner = OnlineRunner("outside", proxy, AgentConfig(mode="online"), gconfig)
    worker = held(runner, n_samples=1)
    doing = await told(worker, "waits for an agent outside to take the task")
    assert (doing.part, doing.limit) == ("task 7", "rollout.agent.timeout_seconds=60")
    headers = {"authorization": f"Bearer {proxy.admin_key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        visit = (await client.post(f"{proxy.origin}/sessions")).json()
        await told(worker, "waits for the next call, reward or end of its agent outside (0 calls were answered)")
        await client.post(f"{proxy.origin}/sessions/{visit['session_id']}/end")
    await told(worker, "waits for the reward of its agent outside")


@pytest.mark.slow
async def test_agent_in_a_process_of_its_own_and_those_that_wait_for_one(held, proxy, gconfig, tokenizer, tmp_path):
    import crashing_agents

    from areal.rollout.loading import Fillers, WorkflowSpec
    from areal.rollout.runners.subprocess import AgentPool, PackedAgent, SubprocessRunner

    tokenizer.save_pretrained(tmp_path)
    packed = PackedAgent(WorkflowSpec(crashing_agents.Obedient, {}).pack(), Fillers(gconfig, str(tmp_path)))
    pool = AgentPool(1)
    try:
        worker = held(SubprocessRunner("hangs", packed, pool, proxy, AgentConfig(mode="subproc"), gconfig))
        assert (await told(worker, "runs in a process of its own")).limit == "rollout.agent.timeout_seconds=60"
        assert (await told(worker, "waits for a free process")).count == 1
    finally:
        await pool.aclose()


async def test_synchronous_agent_runs_its_own_code(held, proxy, gconfig):
    released = threading.Event()

    def agent(data, **kwargs):
        released.wait(60)
        return 1.0

    assert await told(held(AgentRunner(agent, proxy, AgentConfig(), gconfig)), "runs its own code", count=2)
    released.set()
