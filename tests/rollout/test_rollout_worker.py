"""Groups of episodes on one worker, and how a worker is set up."""

import asyncio
import logging
import os
import pickle
import threading

import pytest
from sdk_call import DATA, chat

from areal.api.engine_api import WeightUpdate
from areal.api.errors import GroupLost, RejectReason, WeightMismatch, WorkflowError
from areal.api.messages import EngineAddress, GroupTask
from areal.config.rollout import AgentConfig
from areal.engine.inference.sequence import SequenceState
from areal.proxy import NO_SESSION_KEY
from areal.rollout.dispatch import WeightCheck
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.worker import RolloutWorker
from areal.utils.logging import getLogger


@pytest.fixture
def make_worker(proxy, engine, gconfig):
    """A worker whose one agent trains and evaluates."""

    def make(agent, seconds=60):
        runner = AgentRunner(agent, proxy, AgentConfig(), gconfig)
        return RolloutWorker({False: runner, True: runner}, proxy, engine, seconds)

    return make


def task(n_samples=1, **options):
    return GroupTask(7, pickle.dumps(DATA), n_samples, **options)


async def test_group_has_every_sample_and_the_weights_that_sampled_it(make_worker):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return 1.0

    result = await make_worker(agent).run_group(task(4))
    assert (result.task_id, len(result.episodes), result.rejections) == (7, 4, [])
    assert result.digests == {0: "fake-0"}


async def test_weights_that_an_engine_does_not_tell_stop_the_run(make_worker, engine, monkeypatch):
    """Nothing could be compared with what was published, so a group without them must not pass for one that was."""

    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return 1.0

    monkeypatch.setattr(SequenceState, "_digests", lambda *args: {})
    with pytest.raises(WeightMismatch, match=r"digest of every version .* got none of \[0\] for the group of task 7"):
        await make_worker(agent).run_group(task(2))


async def test_engines_that_disagree_about_a_version_are_both_reported(make_worker, engine):
    """Of one right and one wrong engine, neither may hide the other, whichever answered last."""

    async def agent(data, **kwargs):
        for digest in ("right", "wrong", "right"):
            await engine.update_weights(WeightUpdate(0, digest, ""))
            await chat(kwargs, [{"role": "user", "content": digest}])
        return 1.0

    result = await make_worker(agent).run_group(task(2))
    check = WeightCheck()
    check.publish(0, "right")
    with pytest.raises(WeightMismatch, match="version 0 has the weights right and wrong, published were right"):
        check.check(result.digests)


async def test_failing_sample_keeps_its_siblings(make_worker, proxy):
    runs = []

    async def agent(data, **kwargs):
        number = len(runs)
        runs.append(number)
        await chat(kwargs, data["messages"])
        if number == 1:
            raise ValueError("unlucky")
        return float(number)

    result = await make_worker(agent).run_group(task(4))
    assert sorted(episode.reward for episode in result.episodes) == [0.0, 2.0, 3.0]
    assert [rejection.reason for rejection in result.rejections] == [RejectReason.AGENT_ERROR]
    assert len(proxy) == 0


async def test_sample_that_changes_its_task_leaves_its_siblings_theirs(make_worker):
    lengths = []

    async def agent(data, **kwargs):
        lengths.append(len(data["messages"]))
        data["messages"].append({"role": "user", "content": "hello"})
        await chat(kwargs, data["messages"])
        return 1.0

    await make_worker(agent).run_group(task(3))
    assert lengths == [1, 1, 1]
    assert len(DATA["messages"]) == 1


async def test_cancelled_group_leaves_no_sample_running(make_worker, engine, proxy):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return 1.0

    await engine.pause()
    group = asyncio.ensure_future(make_worker(agent).run_group(task(3)))
    await engine.until_in_flight(3)
    assert len(proxy) == 3
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert (engine.in_flight, len(proxy)) == (0, 0)


async def test_group_is_known_to_have_no_token_until_a_sample_of_it_asks_the_model(make_worker, engine):
    started, may_ask = asyncio.Semaphore(0), [asyncio.Event(), asyncio.Event()]

    async def agent(data, **kwargs):
        mine = may_ask.pop()
        started.release()
        await asyncio.wait_for(mine.wait(), 60)
        await chat(kwargs, data["messages"])
        return 1.0

    waiting, worker = list(may_ask), make_worker(agent)
    await engine.pause()
    assert await worker.unasked_groups() == []
    group = asyncio.ensure_future(worker.run_group(task(2)))
    for _ in waiting:
        await asyncio.wait_for(started.acquire(), 60)
    assert await worker.unasked_groups() == [7]
    waiting[0].set()
    await engine.until_in_flight(1)
    assert await worker.unasked_groups() == []
    waiting[1].set()
    await engine.resume()
    assert len((await group).episodes) == 2
    assert await worker.unasked_groups() == []


async def test_sample_that_hangs_is_timed_out_and_its_siblings_kept(make_worker, proxy):
    runs = []

    async def agent(data, **kwargs):
        runs.append(1)
        if len(runs) == 1:
            await asyncio.Event().wait()
        await chat(kwargs, data["messages"])
        return 1.0

    result = await make_worker(agent, seconds=2).run_group(task(2))
    assert len(result.episodes) == 1
    assert [rejection.reason for rejection in result.rejections] == [RejectReason.TIMEOUT]
    assert len(proxy) == 0


async def test_greedy_evaluation_asks_for_the_likeliest_tokens(make_worker, engine):
    async def agent(data, **kwargs):
        await chat(kwargs, data["messages"])
        return 1.0

    await make_worker(agent).run_group(task(is_eval=True, greedy=True))
    assert [request.gconfig.greedy for request in engine.requests] == [True]


# From here: workers that are set up as in a run.


class Counting:
    """Knows how often its class was constructed in this process, and what its environment said then."""

    made = 0
    base_url = None

    def __init__(self):
        type(self).made += 1
        self.number = type(self).made
        type(self).base_url = os.environ.get("OPENAI_BASE_URL")

    async def run(self, data, **kwargs):
        await chat(kwargs, data["messages"])
        return float(self.number)


class Broken:
    def __init__(self):
        raise OSError("no index here")

    async def run(self, data):
        return 1.0


class Bare:
    """Makes its client without an address."""

    async def run(self, data):
        await chat({}, data["messages"])
        return 1.0


class Held(logging.Handler):
    """Holds the event loop until the log says so."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.noticed = threading.Event()
        self.ended = threading.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        (self.ended if " blocked the event loop" in self.lines[-1] else self.noticed).set()

    async def run(self, data, **kwargs):
        await chat(kwargs, data["messages"])
        assert self.noticed.wait(20)
        return 1.0


HELD = Held()


async def blocks_until_it_is_noticed(data, **kwargs):
    return await HELD.run(data, **kwargs)


async def waits_for_itself(data, **kwargs):
    threading.Event().wait()


@pytest.mark.parametrize("given_again", [False, True])
async def test_class_is_constructed_once_for_training_and_evaluation(start_worker, given_again):
    before = Counting.made
    worker = await start_worker(Counting, Counting if given_again else None)
    trained = await worker.run_group(task(3))
    evaluated = await worker.run_group(task(is_eval=True))
    assert Counting.made == before + 1
    assert {episode.reward for episode in trained.episodes + evaluated.episodes} == {before + 1.0}


async def test_evaluation_may_have_a_workflow_of_its_own(start_worker):
    async def half(data, **kwargs):
        await chat(kwargs, data["messages"])
        return 0.5

    worker = await start_worker(Counting, half)
    (episode,) = (await worker.run_group(task(is_eval=True))).episodes
    assert episode.reward == 0.5


async def test_bare_client_reaches_the_proxy_and_learns_the_remedy(start_worker, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    worker = await start_worker(Bare)
    assert os.environ["OPENAI_API_KEY"] == NO_SESSION_KEY
    (rejection,) = (await worker.run_group(task())).rejections
    assert rejection.reason is RejectReason.AGENT_ERROR
    assert "401" in rejection.detail
    assert "pass base_url and api_key" in rejection.detail
    await worker.aclose()
    assert os.environ["OPENAI_API_KEY"] == "the user's own"
    assert "OPENAI_BASE_URL" not in os.environ


async def test_client_made_in_a_constructor_finds_the_proxy_too(start_worker):
    await start_worker(Counting)
    assert Counting.base_url == os.environ["OPENAI_BASE_URL"] != ""


async def test_worker_that_cannot_be_set_up_leaves_nothing_open(start_worker, engine_listener, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(WorkflowError, match=r"Broken could not be constructed: OSError: no index here"):
        await start_worker(Broken)
    assert "OPENAI_BASE_URL" not in os.environ
    async with asyncio.timeout(20):
        await asyncio.gather(*(channel.closed for channel in list(engine_listener.channels)))


@pytest.fixture
def held_log():
    """What is logged, seen by the agent that blocks until it is."""
    logger = getLogger("rollout")
    logger.addHandler(HELD)
    yield HELD.lines
    logger.removeHandler(HELD)


async def test_episode_that_blocks_is_reported_while_it_does_and_with_its_group(start_worker, held_log):
    worker = await start_worker(blocks_until_it_is_noticed, stall_seconds=0.05)
    first = await worker.run_group(task())
    assert await asyncio.to_thread(HELD.ended.wait, 20)
    second = await worker.run_group(task())
    assert "blocks_until_it_is_noticed (task 7) has been blocking the event loop for" in held_log[0]
    assert "test_rollout_worker.py:" in held_log[0]
    (stall,) = [*first.stalls, *second.stalls]
    assert (stall.source, stall.task_id) == ("assert self.noticed.wait(20)", 7)


async def test_episode_that_blocks_for_its_whole_time_is_rejected_and_others_go_on(start_worker):
    worker = await start_worker(waits_for_itself, Counting, stall_seconds=0.05, agent=AgentConfig(timeout_seconds=3))
    (rejection,) = (await worker.run_group(task())).rejections
    after = await worker.run_group(task(is_eval=True))
    assert rejection.reason is RejectReason.TIMEOUT
    assert "waits_for_itself blocked the event loop for longer than 3 s" in rejection.detail
    assert "threading.Event().wait()" in rejection.trace
    assert len(after.episodes) == 1


class Failing:
    """Asks the engine, and fails when it is gone."""

    gone: asyncio.Event
    asked: asyncio.Event

    async def run(self, data, **kwargs):
        await chat(kwargs, data["messages"])
        type(self).asked.set()
        await type(self).gone.wait()
        raise KeyError("it had to do with the engine")


async def test_group_without_an_engine_for_a_while_is_lost_and_not_rejected(start_worker, engine_listener):
    Failing.gone, Failing.asked = asyncio.Event(), asyncio.Event()
    worker = await start_worker(Failing)
    running = asyncio.ensure_future(worker.run_group(task()))
    await asyncio.wait_for(Failing.asked.wait(), 30)
    await worker.follow([])
    Failing.gone.set()
    with pytest.raises(GroupLost, match="there was no engine for a while when the group of task 7 ran"):
        await asyncio.wait_for(running, 30)


class Asking:
    async def run(self, data, **kwargs):
        await chat(kwargs, data["messages"])
        return 1.0


async def test_calls_wait_for_an_engine_that_is_started_again(start_worker, engine_listener):
    worker = await start_worker(Asking)
    (channel,) = engine_listener.channels
    await channel.close()
    running = asyncio.ensure_future(worker.run_group(task(2)))
    done, _ = await asyncio.wait({running}, timeout=0.05)
    assert not done
    await worker.follow([EngineAddress("engine", 2, engine_listener.address)])
    result = await asyncio.wait_for(running, 30)
    assert [episode.reward for episode in result.episodes] == [1.0, 1.0]
