"""`AsyncRewardWrapper`: outcomes, deadlines, retries, and what a failed call costs."""

import asyncio
import math
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from areal.api.errors import (
    RejectReason,
    RewardCrashed,
    RewardError,
    RewardInvalid,
    RewardLoadFailed,
    RewardOutOfMemory,
    RewardRaised,
    RewardTimeout,
)
from areal.api.reward_api import AsyncRewardWrapper, Limits, Reject, Value
from areal.config.errors import ConfigError

pytestmark = pytest.mark.slow


def length_reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return len(completion) * data["scale"]


def misbehave(kind: str) -> float:
    if kind == "hang":
        signal.pause()
    if kind == "crash":
        os._exit(1)
    if kind == "raise":
        raise KeyError("no such answer")
    return 1.0


async def test_sync_function_runs_with_the_arguments_it_was_given() -> None:
    reward = AsyncRewardWrapper(length_reward, max_workers=2)
    assert await reward("p", "abc", [1], [2], scale=2.0, answer="x") == 6.0
    assert reward.counts == {"ok": 1}


async def test_async_function_is_awaited_in_the_callers_loop() -> None:
    async def pid_and_loop(x: int) -> tuple[int, int]:
        return os.getpid(), id(asyncio.get_running_loop())

    here = (os.getpid(), id(asyncio.get_running_loop()))
    assert await AsyncRewardWrapper(pid_and_loop)(1) == here
    assert await AsyncRewardWrapper(partial(pid_and_loop, 1))() == here


async def test_object_with_async_call_is_awaited() -> None:
    class Judge:
        async def __call__(self, text: str) -> float:
            return float(len(text))

    assert await AsyncRewardWrapper(Judge())("four") == 4.0


async def test_return_value_is_passed_on_unchanged() -> None:
    assert await AsyncRewardWrapper(dict, max_workers=2)(a=1.0) == {"a": 1.0}
    assert math.isnan(await AsyncRewardWrapper(float, max_workers=2)("nan"))


async def test_hang_crash_and_fifty_good_calls_on_two_workers() -> None:
    reward = AsyncRewardWrapper(misbehave, timeout_seconds=3.0, max_workers=2)
    kinds = ["hang", "crash", *["good"] * 50]
    results = await asyncio.gather(*(reward(kind) for kind in kinds), return_exceptions=True)
    assert isinstance(results[0], RewardTimeout)
    assert isinstance(results[1], RewardCrashed)
    assert results[2:] == [1.0] * 50
    assert reward.counts == {"timeout": 1, "crash": 1, "ok": 50}


async def test_failures_say_the_function_and_what_happened_and_map_to_rejection_reasons() -> None:
    reward = AsyncRewardWrapper(misbehave, timeout_seconds=3.0, max_workers=2, on_failure=Reject())
    with pytest.raises(RewardTimeout, match=r"misbehave was killed after 3 s") as late:
        await reward("hang")
    with pytest.raises(RewardCrashed, match="misbehave ended its process: exit status 1"):
        await reward("crash")
    with pytest.raises(RewardRaised, match="misbehave raised KeyError: 'no such answer'") as wrong:
        await reward("raise")
    assert late.value.reason is RejectReason.REWARD_TIMEOUT
    assert wrong.value.reason is RejectReason.REWARD_ERROR
    assert "in misbehave" in wrong.value.__cause__.trace  # type: ignore[union-attr]


async def test_every_failure_is_a_reward_error_and_a_result_that_is_no_data_is_invalid() -> None:
    kinds = {RewardInvalid, RewardTimeout, RewardRaised, RewardLoadFailed, RewardCrashed, RewardOutOfMemory}
    assert all(issubclass(kind, RewardError) for kind in kinds)
    assert not issubclass(RewardCrashed, RewardInvalid)
    reward = AsyncRewardWrapper(complex, max_workers=2)
    with pytest.raises(RewardInvalid, match=r"complex returned no result that can be sent: .*complex 1j"):
        await reward(0, 1)
    with pytest.raises(RewardLoadFailed, match="its arguments cannot be sent to a worker process"):
        await reward(threading.Lock())
    assert reward.counts == {"result": 1, "load": 1}


async def test_stated_value_replaces_a_failure_and_is_still_counted() -> None:
    reward = AsyncRewardWrapper(misbehave, timeout_seconds=0.5, max_workers=2, on_failure=Value(-1.0))
    assert [await reward(kind) for kind in ("hang", "crash", "raise", "good")] == [-1.0, -1.0, -1.0, 1.0]
    assert reward.counts == {"timeout": 1, "crash": 1, "exception": 1, "ok": 1}


async def test_async_function_has_the_same_deadline_and_outcomes() -> None:
    async def slow_or_wrong(slow: bool) -> float:
        if slow:
            await asyncio.Event().wait()
        raise TimeoutError("its own")

    reward = AsyncRewardWrapper(slow_or_wrong, timeout_seconds=0.1)
    with pytest.raises(RewardTimeout, match=r"slow_or_wrong was cancelled after 0\.1 s"):
        await reward(True)
    with pytest.raises(RewardRaised, match="slow_or_wrong raised TimeoutError: its own"):
        await reward(False)
    assert reward.counts == {"timeout": 1, "exception": 1}


async def test_failed_call_is_retried_up_to_max_retries() -> None:
    attempts: list[int] = []

    async def third_time_lucky() -> float:
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError("not yet")
        return 1.0

    reward = AsyncRewardWrapper(third_time_lucky, max_retries=2)
    assert await reward() == 1.0
    assert reward.counts == {"retry": 2, "ok": 1}


async def test_cancelling_the_awaiting_task_cancels_the_call() -> None:
    reward = AsyncRewardWrapper(misbehave, timeout_seconds=600, max_workers=1)
    task = asyncio.create_task(reward("hang"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await reward("good") == 1.0


async def test_wrapper_travels_by_cloudpickle_with_fresh_counts() -> None:
    bonus = 2.0
    reward = AsyncRewardWrapper(lambda x: x + bonus, timeout_seconds=30, max_workers=2)
    assert await reward(1.0) == 3.0
    copy = cloudpickle.loads(cloudpickle.dumps(reward))
    assert await copy(2.0) == 4.0
    assert copy.counts == {"ok": 1}


async def test_wrappers_share_their_worker_processes() -> None:
    rewards = [AsyncRewardWrapper(lambda i=i: os.getpid(), max_workers=2) for i in range(20)]
    assert len({await reward() for reward in rewards}) <= 2


async def test_memory_limit_is_an_outcome_of_its_own() -> None:
    reward = AsyncRewardWrapper(bytearray, max_workers=1, limits=Limits(memory_bytes=512 << 20))
    with pytest.raises(RewardOutOfMemory, match="bytearray needs more memory"):
        await reward(1 << 30)
    assert reward.counts == {"memory": 1}


async def test_module_that_cannot_be_imported_is_an_outcome_of_its_own_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_module.py").write_text(
        "import os\nif os.environ.get('OMP_NUM_THREADS') == '1': import no_such_library\ndef score():\n    return 1.0\n"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here_module  # type: ignore[import-not-found]

    reward = AsyncRewardWrapper(only_here_module.score, max_workers=1)
    with pytest.raises(
        RewardLoadFailed, match=r"score could not be loaded .*No module named 'no_such_library'"
    ) as caught:
        await reward()
    assert "only_here_module.py" in caught.value.__cause__.trace  # type: ignore[union-attr]
    assert reward.counts == {"load": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_fn": 3}, "reward_fn must be callable, got 3"),
        ({"reward_fn": len, "timeout_seconds": 0}, "timeout_seconds must be > 0, got 0"),
        ({"reward_fn": len, "max_workers": 0}, "max_workers must be >= 1, got 0"),
        ({"reward_fn": len, "max_retries": -1}, "max_retries must be >= 0, got -1"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncRewardWrapper(**arguments)


def test_wrapper_works_in_one_event_loop_after_another() -> None:
    reward = AsyncRewardWrapper(math.sqrt, max_workers=2)
    assert [asyncio.run(reward(4.0)), asyncio.run(reward(9.0))] == [2.0, 3.0]
