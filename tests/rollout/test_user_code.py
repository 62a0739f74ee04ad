"""Code that is not ours ends: with its result, its error, or at its deadline."""

import asyncio
import threading

import pytest

from areal.api.errors import AgentFailed, EpisodeTimeout, RewardTimeout
from areal.rollout.episodes import bounded, call


async def never():
    await asyncio.Event().wait()


async def raising(error):
    raise error


async def test_result_and_typed_rejection_pass_through():
    async def good():
        return 3

    assert await bounded(good, 60, "agent") == 3
    with pytest.raises(RewardTimeout):
        await bounded(lambda: raising(RewardTimeout("late")), 60, "agent")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (TimeoutError("own"), "TimeoutError: own"),
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(3), r"it called sys.exit\(3\)"),
    ],
)
async def test_whatever_it_raises_is_the_agents_failure_alone(error, text):
    with pytest.raises(AgentFailed, match=f"agent raised .*{text}"):
        await bounded(lambda: raising(error), 60, "agent")


async def test_deadline_cancels_and_says_where_it_was():
    with pytest.raises(EpisodeTimeout, match=r"agent took longer than rollout.agent.timeout_seconds=0.01") as caught:
        await bounded(never, 0.01, "agent")
    frames = caught.value.__cause__.__traceback__
    names = []
    while frames is not None:
        names.append(frames.tb_frame.f_code.co_name)
        frames = frames.tb_next
    assert "never" in names


async def test_code_that_swallows_its_cancellation_is_abandoned(caplog):
    release = asyncio.Event()
    ended = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    with pytest.raises(EpisodeTimeout):
        await bounded(stubborn, 0.01, "agent", grace_seconds=0.01)
    assert "agent ignores its cancellation" in caplog.text
    release.set()
    await asyncio.wait_for(ended.wait(), 20)


async def test_cancelling_the_caller_cancels_the_code():
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def patient():
        began.set()
        try:
            await never()
        finally:
            cancelled.set()

    task = asyncio.ensure_future(bounded(patient, 60, "agent"))
    await asyncio.wait_for(began.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_synchronous_code_leaves_the_loop_free_however_many_calls_block():
    barrier = threading.Barrier(41)

    def blocking():
        return barrier.wait(timeout=20)

    calls = [asyncio.ensure_future(call(blocking)) for _ in range(40)]
    await asyncio.to_thread(barrier.wait, 20)
    assert len(await asyncio.gather(*calls)) == 40


async def test_synchronous_code_that_hangs_is_given_up_at_the_deadline():
    release, ended = threading.Event(), threading.Event()

    def hanging():
        release.wait(20)
        ended.set()

    with pytest.raises(EpisodeTimeout):
        await bounded(lambda: call(hanging), 0.01, "agent")
    release.set()
    assert await asyncio.to_thread(ended.wait, 20)


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration(), SystemExit(1)])
async def test_whatever_synchronous_code_raises_arrives(error):
    def blocking():
        raise error

    with pytest.raises(AgentFailed):
        await bounded(lambda: call(blocking), 60, "agent")


async def test_synchronous_function_that_returns_a_coroutine_is_awaited():
    async def later():
        return 5

    assert await call(lambda: later()) == 5
