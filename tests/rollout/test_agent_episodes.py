"""Agents against the real proxy with the real SDK: what they are given, what they may return, how they end."""

import asyncio
import sys

import httpx
import numpy as np
import openai
import pytest
from sdk_call import chat

from areal.api.errors import RejectReason
from areal.api.messages import Episode, Rejection
from areal.api.reward_api import AsyncRewardWrapper
from areal.infra import workflow_context
from areal.utils import stats_tracker


class Answering:
    """Asks once and returns what it was made with."""

    def __init__(self, reward):
        self.reward = reward

    async def run(self, data, **extra_kwargs):
        completion = await chat(extra_kwargs, data["messages"])
        return self.reward(completion) if callable(self.reward) else self.reward


async def test_number_rewards_the_last_completion(play, tokenizer):
    episode = await play(Answering(0.5))
    assert isinstance(episode, Episode)
    (row,) = episode.rows
    assert (episode.reward, episode.calls, row.reward) == (0.5, 1, 0.5)
    assert tokenizer.decode(row.input_ids[row.loss_mask]).startswith("1259")
    assert row.returns[row.loss_mask].tolist() == [0.5] * int(row.loss_mask.sum())
    assert episode.messages[-1]["content"] == "1259"
    assert episode.seconds > 0


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.array(1.0)])
async def test_every_kind_of_scalar_is_a_number(play, reward):
    assert (await play(Answering(reward))).reward == 1.0


async def test_dict_rewards_completions_by_id(play):
    async def agent(data, **kwargs):
        first = await chat(kwargs, data["messages"])
        messages = [*data["messages"], first.choices[0].message.model_dump(), {"role": "user", "content": "hello"}]
        second = await chat(kwargs, messages)
        return {first.id: 0.5, second.id: 1.0}

    episode = await play(agent, turn_discount=0.5)
    assert [row.reward for row in episode.rows] == [0.5, 1.0]
    assert [float(row.returns.max()) for row in episode.rows] == [1.0, 1.0]
    assert (episode.reward, episode.calls) == (1.5, 2)
    (whole,) = (await play(agent, export_style="concat")).rows
    assert set(whole.completion_index[whole.loss_mask].tolist()) == {0, 1}


async def test_tree_of_an_episode_has_its_branches_choices_and_no_retries(play):
    async def agent(data, **kwargs):
        first = await chat(kwargs, data["messages"], n=2)
        again = await chat(kwargs, data["messages"], n=2, extra_headers={"x-stainless-retry-count": "1"})
        assert again.id == first.id
        messages = [*data["messages"], first.choices[0].message.model_dump(), {"role": "user", "content": "hello"}]
        await chat(kwargs, messages)
        await chat(kwargs, messages, max_tokens=1)
        return {first.id: 0.25}

    episode = await play(agent)
    nodes = episode.nodes
    # Both choices are the same tokens, so either may be the one that was continued.
    assert [node.parent for node in nodes[:2]] == [None, None]
    assert nodes[2].parent == nodes[3].parent in {0, 1}
    assert [node.extends for node in nodes] == [False, False, True, True]
    said = [[message["content"] for message in node.messages] for node in nodes]
    assert said == [["Sort 5291"], ["Sort 5291"], ["hello"], ["hello"]]
    assert nodes[0].messages is nodes[1].messages
    assert [node.reward for node in nodes] == [0.25, None, None, None]
    assert [node.finish for node in nodes] == ["stop", "stop", "stop", "length"]
    assert [(node.asked, node.answered) for node in nodes] == [turn[:2] for turn in episode.turns]
    assert all(0 <= node.asked <= node.answered <= episode.seconds for node in nodes)
    assert {int(row.completion_index.max()) for row in episode.rows} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (float("nan"), "float nan"),
        (float("inf"), "float inf"),
        ("0.5", "str '0.5'"),
        ({}, "empty dict"),
        ({"chatcmpl-unknown": 1.0}, "str 'chatcmpl-unknown'"),
        (lambda completion: {completion.id: "good"}, "str 'good'"),
        ([1.0], r"list \[1.0\]"),
    ],
)
async def test_what_is_no_reward_rejects_the_episode_naming_agent_and_value(play, reward, text):
    rejection = await play(Answering(reward))
    assert rejection.reason is RejectReason.REWARD_ERROR
    assert "Answering" in rejection.detail
    assert text.replace("\\", "") in rejection.detail


async def test_none_rejects_the_episode(play):
    rejection = await play(Answering(None))
    assert (rejection.reason, rejection.detail.endswith("Answering returned None")) == (RejectReason.FILTERED, True)


@pytest.mark.parametrize("reward", [1.0, {}, {"x": 1.0}, None])
async def test_episode_without_a_model_call_is_rejected_as_such(play, reward):
    async def agent(data):
        return reward

    assert (await play(agent)).reason is RejectReason.NO_INTERACTIONS


async def test_error_of_the_agent_is_kept_with_its_traceback(play, proxy):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return {}["no such tool"]

    rejection = await play(agent)
    assert rejection.reason is RejectReason.AGENT_ERROR
    assert rejection.detail.endswith("raised KeyError: 'no such tool'")
    assert 'return {}["no such tool"]' in rejection.trace
    assert len(proxy) == 0


async def test_detail_is_one_short_line(play):
    async def agent(data):
        raise ValueError("first\nsecond " + "x" * 5000)

    detail = (await play(agent)).detail
    assert "\n" not in detail
    assert len(detail) <= 500


async def test_timeout_cancels_the_agent_aborts_its_generation_and_frees_its_session(play, proxy, engine):
    ended = []

    async def agent(data, **kwargs):
        try:
            return await chat(kwargs, data["messages"])
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    await engine.pause()
    rejection = await play(agent, seconds=1)
    assert rejection.reason is RejectReason.TIMEOUT
    assert "timeout_seconds=1" in rejection.detail
    assert "await chat(kwargs" in rejection.trace
    assert (ended, len(engine.requests)) == (["cancelled"], 1)
    assert (engine.in_flight, len(proxy)) == (0, 0)


async def test_call_that_the_agent_left_running_is_aborted_with_its_session(play, proxy, engine):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        await engine.pause()
        agent.stray = asyncio.ensure_future(chat(kwargs, data["messages"]))
        await engine.until_in_flight(1)
        return 1.0

    episode = await play(agent)
    assert episode.calls == 1
    assert (engine.in_flight, len(proxy)) == (0, 0)
    with pytest.raises(openai.APIError):
        await agent.stray


async def test_reward_function_that_hangs_is_rejected_as_reward_timeout(play):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return await AsyncRewardWrapper(hanging_reward, timeout_seconds=0.01)()

    rejection = await play(agent)
    assert rejection.reason is RejectReason.REWARD_TIMEOUT
    assert "hanging_reward" in rejection.detail


async def hanging_reward():
    await asyncio.Event().wait()


async def test_reward_function_that_raises_is_rejected_as_reward_error(play):
    async def broken():
        raise ZeroDivisionError("no digits")

    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return await AsyncRewardWrapper(broken)()

    rejection = await play(agent)
    assert rejection.reason is RejectReason.REWARD_ERROR
    assert "no digits" in rejection.detail


async def test_run_is_given_only_the_keywords_it_names(play, proxy):
    class Some:
        async def run(self, data, base_url=None, http_client=None):
            completion = await chat(
                {"base_url": base_url, "api_key": "any", "http_client": http_client}, data["messages"]
            )
            return float(completion.choices[0].message.content == data["answer"])

    class Nothing:
        async def run(self, data):
            await chat(workflow_context.get(), data["messages"])
            return 0.25

    class Caller:
        async def __call__(self, data, *, api_key, base_url):
            await chat({"base_url": base_url, "api_key": api_key}, data["messages"])
            return 0.75

    assert (await play(Some())).reward == 1.0
    assert (await play(Nothing())).reward == 0.25
    assert (await play(Caller())).reward == 0.75


async def test_injected_values_are_those_of_the_context(play, proxy):
    seen = {}

    async def agent(data, **kwargs):
        context = workflow_context.get()
        seen.update(kwargs, same=all(getattr(context, key) is value for key, value in kwargs.items()))
        seen.update(task_id=context.task_id, is_eval=context.is_eval, scope=workflow_context.stat_scope())
        seen["shared"] = await workflow_context.get_httpx_client() is kwargs["http_client"]
        await chat(kwargs, data["messages"])
        return 1.0

    await play(agent, is_eval=True)
    assert seen["same"]
    assert seen["shared"]
    assert seen["base_url"].startswith(proxy.origin)
    assert isinstance(seen["http_client"], httpx.AsyncClient)
    assert (seen["task_id"], seen["is_eval"], seen["scope"]) == (7, True, "eval-rollout")
    assert workflow_context.get().task_id is None


async def test_httpx2_client_is_none_where_httpx2_is_not_installed(play, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    seen = {}

    async def agent(data, **kwargs):
        seen.update(kwargs)
        await chat(kwargs, data["messages"])
        return 1.0

    assert (await play(agent)).reward == 1.0
    assert seen["httpx2_client"] is None


async def test_every_session_has_its_own_key(play):
    keys = []

    async def agent(data, api_key, **kwargs):
        keys.append(api_key)
        await chat({**kwargs, "api_key": api_key}, data["messages"])
        return 1.0

    await asyncio.gather(play(agent), play(agent))
    assert len(set(keys)) == 2


async def test_synchronous_run_with_the_synchronous_client_trains(play):
    class Blocking:
        def run(self, data, base_url, api_key):
            with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                completion = client.chat.completions.create(model="any", messages=data["messages"])
            stats_tracker.get(workflow_context.stat_scope()).scalar(length=4)
            return float(completion.choices[0].message.content == data["answer"])

    episode = await play(Blocking())
    assert episode.reward == 1.0
    assert episode.stats == {"rollout/length": 4.0}


async def test_recorded_statistics_are_the_episodes_own_means(play):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        for value in (1, 3):
            stats_tracker.get(workflow_context.stat_scope()).scalar(tries=value)
        return 1.0

    first, second = await asyncio.gather(play(agent), play(agent, is_eval=True))
    assert first.stats == {"rollout/tries": 2.0}
    assert second.stats == {"eval-rollout/tries": 2.0}


async def test_greedy_episode_asks_for_the_likeliest_tokens(play, engine):
    await play(Answering(1.0), greedy=True)
    await play(Answering(1.0))
    assert [request.gconfig.greedy for request in engine.requests] == [True, False]


async def test_outcome_is_a_rejection_or_an_episode_never_an_exception(play):
    async def exits(data):
        sys.exit("done")

    async def cancels_itself(data):
        raise asyncio.CancelledError

    for agent in (exits, cancels_itself):
        outcome = await play(agent)
        assert isinstance(outcome, Rejection)
        assert outcome.reason is RejectReason.AGENT_ERROR
