"""Episodes of agents that live outside and come over HTTP."""

import asyncio
import pickle

import httpx
import pytest
from sdk_call import DATA, MAX_POSITIONS

from areal.api.errors import RejectReason
from areal.api.messages import Episode, GroupTask, Rejection
from areal.config.errors import ConfigError
from areal.config.rollout import AgentConfig, ProxyConfig, ProxyLimits, RolloutConfig
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.episodes import run_episode
from areal.rollout.runners.online import OnlineRunner, OutsideAgent

ADMIN = "sk-chosen"


class Outsider:
    """An agent that has nothing but an address and a key."""

    def __init__(self, origin, key=ADMIN):
        self.origin = origin
        self.http = httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, trust_env=False)

    async def come(self):
        async with asyncio.timeout(10):
            while (answer := await self.http.post(f"{self.origin}/sessions")).status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
        return answer.json()

    async def ask(self, visit, messages):
        url, key = f"{visit['base_url']}/chat/completions", {"authorization": f"Bearer {visit['api_key']}"}
        answer = (await self.http.post(url, json={"messages": messages}, headers=key)).json()
        return answer["id"], answer["choices"][0]["message"]

    async def say(self, visit, verb, **body):
        return await self.http.post(f"{self.origin}/sessions/{visit['session_id']}/{verb}", json=body or None)


@pytest.fixture
async def proxy(engine, tokenizer, gconfig):
    limits = ProxyLimits(session_timeout_seconds=30, reward_timeout_seconds=0.2)
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS, limits=limits, admin_key=ADMIN)
    await proxy.start()
    yield proxy
    await proxy.aclose()


@pytest.fixture
async def outsider(proxy):
    agent = Outsider(proxy.origin)
    yield agent
    await agent.http.aclose()


@pytest.fixture
def begin(proxy, gconfig):
    """An episode that waits for an agent."""

    def begin(seconds=60, **config):
        runner = OnlineRunner("outside", proxy, AgentConfig(mode="online", **config), gconfig)
        context = WorkflowContext(is_eval=False, task_id=7)
        return asyncio.create_task(run_episode(runner, dict(DATA), context, greedy=False, seconds=seconds))

    return begin


async def test_session_of_an_outside_agent_becomes_an_episode(begin, outsider, proxy):
    episode = begin(turn_discount=0.5)
    visit = await outsider.come()
    assert visit["task"] == DATA
    _, message = await outsider.ask(visit, DATA["messages"])
    await outsider.ask(visit, [*DATA["messages"], message, {"role": "user", "content": "again"}])
    await outsider.say(visit, "reward", reward=1)
    await outsider.say(visit, "end")
    outcome, digests = await episode
    assert isinstance(outcome, Episode)
    assert (outcome.reward, outcome.calls, len(outcome.rows)) == (1.0, 2, 2)
    assert outcome.rows[0].returns.max() == 0.5
    assert [(node.parent, node.reward) for node in outcome.nodes] == [(None, None), (0, 1.0)]
    assert digests == {0: "fake-0"}
    assert len(proxy) == len(proxy.online) == 0


async def test_reward_that_comes_after_the_end_still_counts(begin, outsider):
    episode = begin()
    visit = await outsider.come()
    name, _ = await outsider.ask(visit, DATA["messages"])
    await outsider.say(visit, "end")
    assert not episode.done()
    await outsider.say(visit, "reward", reward={name: 0.25})
    outcome, _ = await episode
    assert outcome.reward == 0.25


async def test_session_without_a_reward_is_rejected_at_its_deadline(begin, outsider):
    episode = begin()
    visit = await outsider.come()
    await outsider.ask(visit, DATA["messages"])
    await outsider.say(visit, "end")
    outcome, _ = await episode
    assert isinstance(outcome, Rejection)
    assert outcome.reason is RejectReason.REWARD_TIMEOUT
    assert (await outsider.say(visit, "reward", reward=1)).status_code == 409


@pytest.mark.parametrize(("asks", "reason"), [(True, RejectReason.FILTERED), (False, RejectReason.NO_INTERACTIONS)])
async def test_agent_may_reject_its_session(begin, outsider, asks, reason):
    episode = begin()
    visit = await outsider.come()
    if asks:
        await outsider.ask(visit, DATA["messages"])
    await outsider.say(visit, "end")
    await outsider.say(visit, "reward", reward=None)
    outcome, _ = await episode
    assert outcome.reason is reason


@pytest.mark.parametrize("comes", [False, True])
async def test_episode_that_takes_too_long_is_a_timeout_and_frees_its_session(begin, outsider, proxy, comes):
    episode = begin(seconds=0.5)
    if comes:
        await outsider.come()
    outcome, _ = await episode
    assert outcome.reason is RejectReason.TIMEOUT
    assert len(proxy) == len(proxy.online) == 0


async def test_cancelled_episode_ends_its_session(begin, outsider, proxy):
    episode = begin()
    visit = await outsider.come()
    episode.cancel()
    await asyncio.wait((episode,))
    assert len(proxy) == 0
    url = f"{visit['base_url']}/chat/completions"
    assert (await outsider.http.post(url, json={"messages": DATA["messages"]})).status_code in (401, 410)


async def test_worker_in_mode_online_trains_on_outside_agents(start_worker):
    online = AgentConfig(mode="online", self_reward=True)
    worker = await start_worker(OutsideAgent, agent=online, proxy=ProxyConfig(admin_key=ADMIN))
    outsider = Outsider(worker.proxy.origin)
    try:
        group = asyncio.create_task(worker.run_group(GroupTask(7, pickle.dumps(DATA), 4)))
        for number in range(4):
            visit = await outsider.come()
            await outsider.ask(visit, visit["task"]["messages"])
            outsider.http.headers["authorization"] = f"Bearer {visit['api_key']}"  # it may reward itself
            assert (await outsider.say(visit, "reward", reward=number)).status_code == 200
            assert (await outsider.say(visit, "end")).status_code == 200
            outsider.http.headers["authorization"] = f"Bearer {ADMIN}"
        result = await group
    finally:
        await outsider.http.aclose()
    assert sorted(episode.reward for episode in result.episodes) == [0, 1, 2, 3]
    assert result.rejections == []


async def test_agent_that_lives_outside_cannot_run_inside(play):
    outcome = await play(OutsideAgent())
    assert "mode=online" in outcome.detail


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_listening_beyond_this_machine_needs_an_admin_key(host):
    with pytest.raises(ConfigError, match="admin_key"):
        ProxyConfig(host=host)
    ProxyConfig(host=host, admin_key="chosen")


def test_online_agents_have_one_address():
    with pytest.raises(ConfigError, match="num_workers"):
        RolloutConfig(agent=AgentConfig(mode="online"), num_workers=2)
