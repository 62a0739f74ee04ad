"""Groups in flight and their way to the trainer."""

import asyncio
import itertools
import random
import threading
from dataclasses import replace

import pytest
from fake_workers import DEADLINE_SECONDS, HeldWorker, PromptWorker, group, make_pipeline

from areal.api.errors import GroupLost, NothingAccepted, ProcessDied, RejectReason, WeightMismatch, WorkflowError
from areal.api.messages import GroupResult, Rejection


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, DEADLINE_SECONDS)


async def until_idle():
    """Let everything that is ready to run have its turns."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def worker():
    return HeldWorker()


async def test_nothing_starts_before_weights_are_published(worker):
    pipeline = make_pipeline([worker])
    await until_idle()
    assert worker.tasks == []
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1, 2, 3)
    await pipeline.aclose()


async def test_batch_is_handed_over_when_enough_groups_are_ready_oldest_first(worker):
    pipeline = make_pipeline([worker])
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1, 2, 3)
    batch = asyncio.ensure_future(pipeline.take(2))
    worker.finish(group(3, version=1))
    await until_idle()
    assert not batch.done()
    worker.finish(group(2))
    assert [result.task_id for result in await soon(batch)] == [2, 3]
    await pipeline.aclose()


@pytest.mark.parametrize("seed", range(5))
async def test_synchronous_batches_are_the_same_in_whatever_order_groups_end(worker, seed):
    """Also if some are rejected, or filtered: each batch is the next four tasks that are not."""
    draw = random.Random(seed)
    pipeline = make_pipeline([worker], batch_size=4, max_staleness=0, keep=lambda result: result.task_id != 3)
    batches = []
    for version in range(2):
        pipeline.publish(version, f"w{version}")
        batch = asyncio.ensure_future(pipeline.take(4))
        for _ in range(7):  # four groups, and the three that replace others
            await until_idle()
            if worker.running:
                task_id = draw.choice(worker.running)
                rejected = task_id in (0, 4, 10)
                worker.finish(group(task_id, version, episodes=int(not rejected), rejected=int(rejected)))
        batches.append([result.task_id for result in await soon(batch)])
    assert batches == [[1, 2, 5, 6], [7, 8, 9, 11]]
    assert sorted(pipeline.pop_rejected()) == [0, 3, 4, 10]
    await pipeline.aclose()


async def test_synchronous_training_runs_nothing_between_take_and_publish(worker):
    pipeline = make_pipeline([worker], max_staleness=0)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0))
    worker.finish(group(1))
    await soon(pipeline.take(2))
    await until_idle()
    assert worker.running == []
    pipeline.publish(1, "w1")
    await worker.until_running(2, 3)
    await pipeline.aclose()


async def test_group_that_ends_too_old_is_dropped_and_replaced(worker):
    pipeline = make_pipeline([worker], max_staleness=0, batch_size=1, when_stale="drop")
    pipeline.publish(0, "w0")
    await worker.until_running(0)
    pipeline.publish(1, "w1")
    worker.finish(group(0, version=0))
    await worker.until_running(1, 2)
    assert pipeline.rejections.counts == {RejectReason.STALE: 1}
    worker.finish(group(1, version=1))
    assert [result.task_id for result in await soon(pipeline.take(1))] == [1]
    await pipeline.aclose()


async def test_ready_group_that_grows_too_old_is_dropped_and_replaced(worker):
    pipeline = make_pipeline([worker], max_staleness=1, batch_size=1, when_stale="drop")
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0, version=0, episodes=3))
    await worker.until_running(1)
    pipeline.publish(1, "w1")
    await worker.until_running(1, 2)
    pipeline.publish(2, "w2")
    await worker.until_running(1, 2, 3, 4)
    assert pipeline.rejections.counts == {RejectReason.STALE: 3}
    assert pipeline.pop_rejected() == [0]
    worker.finish(group(2, version=1))
    assert [result.task_id for result in await soon(pipeline.take(1))] == [2]
    await pipeline.aclose()


async def test_batch_waits_for_the_group_that_the_next_one_could_not_take(worker):
    pipeline = make_pipeline([worker], max_staleness=1, batch_size=1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(1))
    assert [result.task_id for result in await soon(pipeline.take(1))] == [1]
    pipeline.publish(1, "w1")
    await worker.until_running(0, 2)
    worker.finish(group(2, version=1))
    batch = asyncio.ensure_future(pipeline.take(1))
    await until_idle()
    assert not batch.done()
    worker.finish(group(0))
    assert [result.task_id for result in await soon(batch)] == [0]
    assert pipeline.expiring_wait_seconds > 0
    pipeline.publish(2, "w2")
    assert [result.task_id for result in await soon(pipeline.take(1))] == [2]
    assert pipeline.rejections.counts.total() == 0
    await pipeline.aclose()


@pytest.mark.parametrize("when_stale", ["drop", "train"])
async def test_batch_waits_for_no_one_unless_it_is_asked_to(worker, when_stale):
    pipeline = make_pipeline([worker], max_staleness=1, batch_size=1, when_stale=when_stale)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    for version in (0, 1):
        worker.finish(group(version + 1, version))
        assert [result.task_id for result in await soon(pipeline.take(1))] == [version + 1]
        pipeline.publish(version + 1, f"w{version + 1}")
        await worker.until_running(0, version + 2)
    worker.finish(group(0, episodes=2))
    worker.finish(group(3, version=2))
    taken = [result.task_id for result in await soon(pipeline.take(1))]
    dropped = pipeline.pop_dropped()
    if when_stale == "train":
        assert (taken, dropped.groups) == ([0], 0)
    else:
        assert (taken, dropped.groups, dropped.episodes) == ([3], 1, 2)
        assert dropped.means() == {"tokens": 2, "seconds": 0, "reward": 1}
        assert pipeline.pop_dropped().groups == 0
    await pipeline.aclose()


async def test_group_that_runs_again_is_as_old_as_its_second_start():
    first, second = HeldWorker(), HeldWorker()
    pipeline = make_pipeline([first, second], max_staleness=1, batch_size=1)
    pipeline.publish(0, "w0")
    await first.until_running(0)
    await second.until_running(1)
    second.finish(group(1))
    await soon(pipeline.take(1))
    pipeline.publish(1, "w1")
    await second.until_running(2)
    first.present = False
    first.break_down(0, GroupLost("rollout worker 0 was killed"))
    await second.until_running(2, 0)
    second.finish(group(2, version=1))
    assert [result.task_id for result in await soon(pipeline.take(1))] == [2]
    await pipeline.aclose()


async def test_whole_run_consumes_in_bounds_and_starts_no_more_than_it_needs():
    pipeline = None
    worker = PromptWorker(lambda: pipeline.admission.version)
    pipeline = make_pipeline([worker], max_staleness=2, batch_size=3, total_groups=30)
    pipeline.publish(0, "w0")
    for version in range(1, 11):
        for result in await soon(pipeline.take(3)):
            assert pipeline.admission.version - result.episodes[0].rows[0].versions[1] <= 2
        pipeline.publish(version, f"w{version}")
    await until_idle()
    assert worker.seen == list(range(30))
    assert pipeline.rejections.counts.total() == 0
    await pipeline.aclose()


async def test_nothing_polls_and_no_timer_is_set(worker, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a timer was set")

    pipeline = make_pipeline([worker], batch_size=1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    batch = asyncio.ensure_future(pipeline.take(1))
    await until_idle()
    monkeypatch.setattr(asyncio, "sleep", refuse)
    monkeypatch.setattr(asyncio.get_running_loop(), "call_at", refuse)
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", refuse)
    worker.finish(group(0))
    assert [result.task_id for result in await batch] == [0]
    pipeline.publish(1, "w1")
    monkeypatch.undo()
    await worker.until_running(1, 2)
    await pipeline.aclose()


async def test_rejected_group_is_replaced_and_its_survivors_are_kept(worker):
    pipeline = make_pipeline([worker], batch_size=1, max_staleness=0, n_samples=3)
    pipeline.publish(0, "w0")
    await worker.until_running(0)
    worker.finish(group(0, episodes=0, rejected=3))
    await worker.until_running(1)
    worker.finish(group(1, episodes=1, rejected=2))
    (batch,) = await soon(pipeline.take(1))
    assert (batch.task_id, len(batch.episodes)) == (1, 1)
    assert pipeline.rejections.counts == {RejectReason.AGENT_ERROR: 5}
    await pipeline.aclose()


async def test_tasks_that_are_given_up_are_told_once_and_trained_ones_are_not(worker):
    pipeline = make_pipeline([worker], batch_size=1, keep=lambda result: result.task_id != 1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0, episodes=0, rejected=1))
    worker.finish(group(1))
    await worker.until_running(2, 3)
    worker.finish(group(2))
    await soon(pipeline.take(1))
    assert sorted(pipeline.pop_rejected()) == [0, 1]
    assert pipeline.pop_rejected() == []
    assert pipeline.rejections.counts == {RejectReason.AGENT_ERROR: 1, RejectReason.FILTERED: 1}
    await pipeline.aclose()


async def test_run_in_which_nothing_is_accepted_stops_with_the_cause(worker, caplog):
    pipeline = make_pipeline([worker], batch_size=1, max_staleness=0, max_idle_rejections=6)
    pipeline.publish(0, "w0")
    batch = asyncio.ensure_future(pipeline.take(1))
    for number in range(3):
        await worker.until_running(number)
        worker.finish(group(number, episodes=0, rejected=2))
    with pytest.raises(
        NothingAccepted,
        match=r"first 6 episodes all failed alike .*agent_error 6.*the latest: Agent raised KeyError: 'x'",
    ):
        await soon(batch)
    assert worker.running == []
    assert caplog.text.count("Agent raised KeyError") == 2
    await pipeline.aclose()


def rejected_at(reason, line=0):
    trace = f'Traceback\n  File "agent.py", line {line}, in run\nKeyError: 1' if line else ""
    return GroupResult(0, [], [Rejection(reason, "Agent raised", trace)], {})


@pytest.mark.parametrize(
    ("results", "ends"),
    [
        ([rejected_at(RejectReason.AGENT_ERROR, 7)] * 4, True),
        ([rejected_at(RejectReason.TIMEOUT)] * 4, True),
        ([rejected_at(RejectReason.AGENT_ERROR, line) for line in (7, 7, 7, 8)], False),
        ([rejected_at(reason, 7) for reason in (RejectReason.AGENT_ERROR, RejectReason.REWARD_ERROR)] * 2, False),
        ([rejected_at(RejectReason.FILTERED)] * 4, False),
        ([group(0), *[rejected_at(RejectReason.AGENT_ERROR, 7)] * 4], False),
    ],
    ids=["at one line", "timeouts", "at two lines", "for two reasons", "filtered", "after one was accepted"],
)
async def test_only_a_run_that_begins_with_failures_of_one_kind_is_given_up_at_once(worker, results, ends):
    pipeline = make_pipeline([worker], batch_size=1, max_staleness=100, max_running=1, max_idle_rejections=4)
    pipeline.publish(0, "w0")
    for number, result in enumerate(results):
        await worker.until_running(number)
        worker.finish(replace(result, task_id=number))
    await until_idle()
    taken = asyncio.ensure_future(pipeline.take(2))
    await until_idle()
    assert taken.done() == ends
    if ends:
        with pytest.raises(NothingAccepted, match=r"first 4 episodes all failed alike"):
            await taken
    taken.cancel()
    await pipeline.aclose()


async def test_what_fails_in_many_ways_is_given_up_after_eight_times_as_many(worker):
    pipeline = make_pipeline([worker], batch_size=1, max_staleness=100, max_running=1, max_idle_rejections=2)
    pipeline.publish(0, "w0")
    taken = asyncio.ensure_future(pipeline.take(1))
    for number in range(16):
        assert not taken.done()
        await worker.until_running(number)
        worker.finish(replace(rejected_at(RejectReason.AGENT_ERROR, 1 + number), task_id=number))
    with pytest.raises(NothingAccepted, match=r'last 16 episodes were all rejected(.|\n)*File "agent.py", line 16'):
        await soon(taken)
    await pipeline.aclose()


async def test_evaluation_whose_first_episodes_all_fail_alike_stops_the_run(worker):
    pipeline = make_pipeline([worker], batch_size=1, max_idle_rejections=3)
    pipeline.publish(0, "w0")
    evaluation = asyncio.ensure_future(pipeline.evaluate([{}] * 9, greedy=False, max_running=4))
    for place in range(1, 4):
        await until_idle()
        worker.finish(replace(rejected_at(RejectReason.AGENT_ERROR, 7), task_id=-place))
    with pytest.raises(NothingAccepted, match=r"first 3 evaluation episodes all failed alike"):
        await soon(evaluation)
    with pytest.raises(NothingAccepted):
        await soon(pipeline.take(1))
    await pipeline.aclose()


async def test_accepted_episode_begins_the_count_of_idle_rejections_anew(worker):
    pipeline = make_pipeline([worker], batch_size=1, max_staleness=1, max_idle_rejections=4)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0, episodes=1, rejected=3))
    worker.finish(group(1, episodes=0, rejected=3))
    await worker.until_running(2)
    assert (await soon(pipeline.take(1)))[0].task_id == 0
    await pipeline.aclose()


async def test_tokens_of_weights_that_were_never_published_stop_the_run(worker):
    pipeline = make_pipeline([worker], batch_size=1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0, digests={0: "w0"}))
    worker.finish(group(1, digests={0: "other"}))
    await until_idle()
    with pytest.raises(WeightMismatch, match="version 0 has the weights other, published were w0"):
        await soon(pipeline.take(1))
    await pipeline.aclose()


async def test_evaluation_on_weights_that_were_never_published_fails(worker):
    pipeline = make_pipeline([worker], batch_size=1)
    evaluation = asyncio.ensure_future(pipeline.evaluate([{}], greedy=True, max_running=4))
    await worker.until_running(-1)
    pipeline.publish(0, "w0")
    worker.finish(group(-1, digests={0: "other"}))
    with pytest.raises(WeightMismatch, match="version 0 has the weights other, published were w0"):
        await soon(evaluation)
    await pipeline.aclose()


async def test_version_that_an_engine_uses_first_is_compared_when_it_is_published(worker):
    pipeline = make_pipeline([worker], batch_size=1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0, digests={0: "w0", 1: "early"}))
    await soon(pipeline.take(1))
    with pytest.raises(WeightMismatch, match="version 1 has the weights early, published were w1"):
        pipeline.publish(1, "w1")
    await pipeline.aclose()


async def test_version_between_published_ones_that_never_was_is_a_mismatch(worker):
    pipeline = make_pipeline([worker], batch_size=1)
    pipeline.publish(5, "w5")
    await worker.until_running(*range(7))
    worker.finish(group(0, version=5, digests={4: "w4"}))
    with pytest.raises(WeightMismatch, match="none of that version"):
        await soon(pipeline.take(1))
    await pipeline.aclose()


async def test_failure_wakes_take_and_evaluate_with_the_error_itself(worker):
    pipeline = make_pipeline([worker], batch_size=1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    waiting = [
        asyncio.ensure_future(pipeline.take(1)),
        asyncio.ensure_future(pipeline.evaluate([{}, {}], greedy=False, max_running=4)),
    ]
    await worker.until_running(0, 1, -1, -2)
    pipeline.fail(ProcessDied("the engine was killed"))
    pipeline.fail(ProcessDied("and so was the worker"))
    for each in waiting:
        with pytest.raises(ProcessDied, match="the engine was killed"):
            await soon(each)
    assert sorted(worker.cancelled) == [-2, -1]
    with pytest.raises(ProcessDied):
        await soon(pipeline.evaluate([{}], greedy=False, max_running=4))
    await pipeline.aclose()
    assert worker.running == []


async def test_worker_that_breaks_down_fails_those_who_wait(worker):
    pipeline = make_pipeline([worker], batch_size=1)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.break_down(0, ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await soon(pipeline.take(1))
    assert len(worker.tasks) == 2
    await pipeline.aclose()


async def test_filter_that_raises_fails_the_run_instead_of_hanging_it(worker):
    def keep(result):
        return result.no_such_field

    pipeline = make_pipeline([worker], batch_size=1, keep=keep)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    worker.finish(group(0))
    with pytest.raises(AttributeError, match="no_such_field"):
        await soon(pipeline.take(1))
    await pipeline.aclose()


async def test_task_that_cannot_travel_fails_the_run_with_the_reason(worker):
    tasks = ((number, {"lock": threading.Lock()}) for number in itertools.count())
    pipeline = make_pipeline([worker], tasks=tasks)
    pipeline.publish(0, "w0")
    with pytest.raises(WorkflowError, match=r"a task cannot be sent to a rollout worker: .*lock"):
        await soon(pipeline.take(1))
    await pipeline.aclose()


async def test_worker_that_never_answers_is_named(worker):
    pipeline = make_pipeline([worker], group_seconds=0.01)
    pipeline.publish(0, "w0")
    with pytest.raises(WorkflowError, match=r"rollout worker 0 gave no answer for 0.01 s.*blocks its event loop"):
        await soon(pipeline.take(1))
    await pipeline.aclose()


async def test_group_goes_to_the_worker_with_the_least_to_do():
    workers = [HeldWorker(), HeldWorker()]
    pipeline = make_pipeline(workers, batch_size=4, max_staleness=0, total_groups=5)
    pipeline.publish(0, "w0")
    await workers[0].until_running(0, 2)
    await workers[1].until_running(1, 3)
    for number in (1, 3):
        workers[1].finish(group(number, episodes=0, rejected=1))
    await workers[1].until_running(4, 5)
    assert len(workers[0].tasks) == 2
    await pipeline.aclose()


async def test_closing_cancels_what_runs_and_fails_those_who_wait(worker):
    pipeline = make_pipeline([worker])
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1, 2, 3)
    batch = asyncio.ensure_future(pipeline.take(2))
    await until_idle()
    await soon(pipeline.aclose())
    assert sorted(worker.cancelled) == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="closed"):
        await soon(batch)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_evaluation_runs_each_task_once_during_training_and_keeps_the_order(worker):
    pipeline = make_pipeline([worker])
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1, 2, 3)
    seen: list[int] = []
    evaluation = asyncio.ensure_future(
        pipeline.evaluate(
            [{"number": 7}, {"number": 8}, {"number": 9}],
            greedy=True,
            max_running=50,
            on_result=lambda result: seen.append(result.task_id),
        )
    )
    await worker.until_running(0, 1, 2, 3, -1, -2, -3)
    for number in (-3, -1, -2):
        worker.finish(group(number, episodes=int(number != -2), rejected=int(number == -2)))
    results = await soon(evaluation)
    assert [result.task_id for result in results] == [-1, -2, -3]
    assert sorted(seen) == [-3, -2, -1]
    assert [(task.is_eval, task.greedy, task.n_samples) for task in worker.tasks[4:]] == [(True, True, 1)] * 3
    assert pipeline.rejections.counts.total() == 0
    assert pipeline.evaluation_rejections.counts == {RejectReason.AGENT_ERROR: 1}
    worker.finish(group(0))
    worker.finish(group(1))
    assert len(await soon(pipeline.take(2))) == 2
    await pipeline.aclose()


async def test_evaluation_goes_first_and_both_together_stay_within_the_bound(worker):
    pipeline = make_pipeline([worker], n_samples=2, max_running=2, batch_size=8)
    pipeline.publish(0, "w0")
    await worker.until_running(0, 1)
    evaluation = asyncio.ensure_future(pipeline.evaluate([{}] * 6, greedy=False, max_running=4))
    await until_idle()
    assert worker.running == [0, 1]
    worker.finish(group(0))
    await worker.until_running(1, -1, -2)
    worker.finish(group(1))
    await worker.until_running(-1, -2, -3, -4)
    worker.finish(group(-1))
    worker.finish(group(-2))
    await worker.until_running(-3, -4, -5, -6)
    worker.finish(group(-3))
    worker.finish(group(-4))
    await worker.until_running(-5, -6, 2)
    worker.finish(group(-5))
    worker.finish(group(-6))
    assert len(await soon(evaluation)) == 6
    await worker.until_running(2, 3)
    await pipeline.aclose()


async def test_evaluation_error_reaches_its_caller_and_leaves_nothing_running(worker):
    pipeline = make_pipeline([worker])
    evaluation = asyncio.ensure_future(pipeline.evaluate([{}, {}], greedy=False, max_running=4))
    await worker.until_running(-1, -2)
    worker.break_down(-1, ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await soon(evaluation)
    assert worker.cancelled == [-2]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelled_evaluation_cancels_its_episodes(worker):
    pipeline = make_pipeline([worker])
    evaluation = asyncio.ensure_future(pipeline.evaluate([{}, {}], greedy=False, max_running=4))
    await worker.until_running(-1, -2)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    assert sorted(worker.cancelled) == [-2, -1]


async def test_evaluation_of_nothing_is_nothing(worker):
    pipeline = make_pipeline([worker])
    assert await soon(pipeline.evaluate([], greedy=False, max_running=4)) == []


async def test_group_that_is_lost_with_its_worker_runs_again_elsewhere_and_is_not_rejected() -> None:
    first, second = HeldWorker(), HeldWorker()
    pipeline = make_pipeline([first, second], batch_size=1, max_staleness=0)
    pipeline.publish(0, "d0")
    await first.until_running(0)
    first.present = False
    first.break_down(0, GroupLost("rollout worker 0 was killed"))
    await second.until_running(0)
    second.finish(group(0))
    assert [result.task_id for result in await pipeline.take(1)] == [0]
    assert pipeline.rejections.counts.total() == 0
    assert pipeline.pop_rejected() == []
    await pipeline.aclose()


async def test_group_that_is_lost_waits_for_the_only_worker_to_come_back() -> None:
    worker = HeldWorker()
    pipeline = make_pipeline([worker], batch_size=1, max_staleness=0)
    pipeline.publish(0, "d0")
    await worker.until_running(0)
    worker.present = False
    worker.break_down(0, GroupLost("rollout worker 0 was killed"))
    await worker.until_running()
    worker.come_back()
    await worker.until_running(0)
    worker.finish(group(0))
    assert [result.task_id for result in await pipeline.take(1)] == [0]
    assert [task.task_id for task in worker.tasks] == [0, 0]
    await pipeline.aclose()
