"""Agents in real processes: what reaches them, what comes back, and what their end costs others."""

import asyncio
import pickle
import threading

import crashing_agents
import pytest
from sdk_call import DATA

from areal.api.errors import ConfigError, RejectReason, WorkflowError
from areal.api.messages import Episode, GroupTask
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config
from areal.config.rollout import AgentConfig
from areal.infra.workflow_context import WorkflowContext
from areal.rollout.episodes import run_episode
from areal.rollout.loading import Fillers, WorkflowSpec
from areal.rollout.runners.subprocess import AgentPool, PackedAgent, SubprocessRunner
from areal.utils.callables import name_of

pytestmark = pytest.mark.slow


@pytest.fixture
async def pool(request):
    pool = AgentPool(getattr(request, "param", 2))
    yield pool
    await pool.aclose()


one_process = pytest.mark.parametrize("pool", [1], indirect=True, ids=["one process"])


@pytest.fixture
def make_runner(pool, proxy, gconfig, tokenizer, tmp_path):
    def make(agent, **kwargs):
        tokenizer.save_pretrained(tmp_path)
        packed = PackedAgent(WorkflowSpec(agent, kwargs).pack(), Fillers(gconfig, str(tmp_path)))
        return SubprocessRunner(name_of(agent), packed, pool, proxy, AgentConfig(mode="subproc"), gconfig)

    return make


async def play(runner, *, seconds=60, is_eval=False, **data):
    context = WorkflowContext(is_eval=is_eval, task_id=7)
    outcome, _ = await run_episode(runner, DATA | data, context, greedy=False, seconds=seconds)
    return outcome


async def test_context_and_statistics_travel_both_ways(make_runner):
    runner = make_runner(crashing_agents.Telling)
    trained, evaluated = await play(runner), await play(runner, is_eval=True)
    assert (trained.reward, trained.calls, trained.messages[-1]["content"]) == (1.0, 1, "1259")
    assert [node.message["content"] for node in trained.nodes] == ["1259"]
    assert trained.stats["rollout/task_id"] == 7
    assert trained.stats["rollout/tries"] == 2.0
    assert "eval-rollout/tries" in evaluated.stats


async def test_agent_is_given_address_and_key_but_no_client(make_runner):
    stats = (await play(make_runner(crashing_agents.Telling))).stats
    assert (stats["rollout/given"], stats["rollout/http_client"]) == (2, 0)


async def test_agent_is_made_once_per_process(make_runner):
    runner = make_runner(crashing_agents.Telling)
    episodes = await asyncio.gather(*(play(runner) for _ in range(6)))
    assert {episode.stats["rollout/made"] for episode in episodes} == {1.0}
    assert len({episode.stats["rollout/pid"] for episode in episodes}) <= 2


@pytest.mark.parametrize(
    ("agent", "reward"),
    [(crashing_agents.Synchronous, 1.0), (crashing_agents.Keyless, 0.75), (crashing_agents.Claude, 0.25)],
)
async def test_synchronous_client_reaches_its_own_session(make_runner, agent, reward):
    episode = await play(make_runner(agent))
    assert isinstance(episode, Episode), episode
    assert (episode.reward, episode.calls) == (reward, 1)


@pytest.mark.parametrize(
    ("end", "reason", "detail"),
    [
        ("crash", RejectReason.AGENT_ERROR, "Obedient ended its process: exit status 3"),
        ("raise", RejectReason.AGENT_ERROR, "Obedient raised KeyError: 'no such tool'"),
        ("exit", RejectReason.AGENT_ERROR, "Obedient raised SystemExit: done"),
        ("reward", RejectReason.REWARD_ERROR, "no digits"),
        ("text", RejectReason.REWARD_ERROR, "str 'good'"),
        ("none", RejectReason.FILTERED, "Obedient returned None"),
    ],
)
async def test_end_of_an_episode_keeps_its_reason(make_runner, proxy, end, reason, detail):
    rejection = await play(make_runner(crashing_agents.Obedient), end=end)
    assert rejection.reason is reason
    assert detail in rejection.detail
    assert ("ZeroDivisionError" in rejection.trace) == (end == "reward")
    assert ('{}["no such tool"]' in rejection.trace) == (end == "raise")
    assert len(proxy) == 0


async def test_dict_rewards_completions_by_id(make_runner):
    assert (await play(make_runner(crashing_agents.Obedient), end="dict")).reward == 0.5


@one_process
async def test_hanging_process_is_killed_at_the_deadline_and_replaced(make_runner, pool, proxy):
    runner = make_runner(crashing_agents.Obedient)
    await play(runner)
    (hung,) = pool.processes.pids()
    rejection = await play(runner, end="hang", seconds=1)
    assert rejection.reason is RejectReason.TIMEOUT
    assert "rollout.agent.timeout_seconds=1" in rejection.detail
    assert (await play(runner)).reward == 1.0
    assert hung not in pool.processes.pids()
    assert len(proxy) == 0


@one_process
async def test_cancelled_episode_kills_its_process_and_aborts_its_call(make_runner, pool, proxy, engine):
    runner = make_runner(crashing_agents.Obedient)
    await play(runner)
    (called,) = pool.processes.pids()
    await engine.pause()
    episode = asyncio.ensure_future(play(runner))
    await engine.until_in_flight(1)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert (engine.in_flight, len(proxy)) == (0, 0)
    await engine.resume()
    assert (await play(runner)).reward == 1.0
    assert called not in pool.processes.pids()


async def test_fifty_episodes_on_two_processes_lose_only_the_one_that_crashes_and_the_one_that_hangs(
    make_runner, pool, proxy, engine
):
    runner = make_runner(crashing_agents.Obedient)
    await runner.prepare()
    ends = {7: "crash", 19: "hang"}
    outcomes = await asyncio.gather(*(play(runner, end=ends.get(number), seconds=10) for number in range(50)))
    lost = {number: outcome.reason for number, outcome in enumerate(outcomes) if not isinstance(outcome, Episode)}
    assert lost == {7: RejectReason.AGENT_ERROR, 19: RejectReason.TIMEOUT}
    assert (engine.in_flight, len(proxy)) == (0, 0)
    assert len(pool.processes.pids()) == 2


async def test_waiting_for_a_process_opens_no_session(make_runner, engine, proxy):
    runner = make_runner(crashing_agents.Obedient)
    await engine.pause()
    episodes = [asyncio.ensure_future(play(runner)) for _ in range(6)]
    await engine.until_in_flight(2)
    assert len(proxy) == 2
    await engine.resume()
    assert [episode.reward for episode in await asyncio.gather(*episodes)] == [1.0] * 6


async def test_constructor_is_completed_from_the_config(make_runner, tokenizer, gconfig):
    episode = await play(make_runner(crashing_agents.Equipped, factor=2))
    assert episode.reward == 2 * gconfig.max_new_tokens + len(tokenizer.encode("1259"))


async def test_objects_that_only_exist_here_travel_by_value(make_runner):
    factor = 0.5

    class Local:
        def __init__(self, bonus):
            self.bonus = bonus

        async def run(self, data, **extra_kwargs):
            from sdk_call import chat

            await chat(extra_kwargs, data["messages"])
            return factor + self.bonus

    assert (await play(make_runner(Local(0.25)))).reward == 0.75


def test_agent_that_cannot_be_pickled_is_refused_with_the_reason():
    agent = crashing_agents.Telling()
    agent.lock = threading.Lock()
    with pytest.raises(WorkflowError, match=r"Telling cannot be sent to a rollout worker: TypeError: cannot pickle"):
        WorkflowSpec(agent).pack()


# From here: workers that are set up as in a run.


SUBPROC = AgentConfig(mode="subproc", subproc_max_workers=1)


async def test_worker_runs_a_group_in_processes(start_worker):
    worker = await start_worker("crashing_agents.Telling", agent=SUBPROC)
    result = await worker.run_group(GroupTask(7, pickle.dumps(DATA), 2))
    assert [episode.reward for episode in result.episodes] == [1.0, 1.0]
    assert result.digests == {0: "fake-0"}


async def test_agent_that_cannot_be_made_is_refused_when_its_worker_starts(start_worker):
    with pytest.raises(WorkflowError, match=r"Unmakeable could not be constructed: OSError: no index here"):
        await start_worker(crashing_agents.Unmakeable, agent=SUBPROC)


def test_mode_is_set_by_either_spelling():
    for section in ("agent", "openai"):
        config, _ = load_expr_config([f"rollout.{section}.mode=subproc"], GRPOConfig)
        assert (config.rollout.agent.mode, config.rollout.agent.subproc_max_workers) == ("subproc", 4)
    with pytest.raises(ConfigError, match="subproc_max_workers must be >= 1, got 0"):
        AgentConfig(subproc_max_workers=0)
