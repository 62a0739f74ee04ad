"""Call a reward function from an episode without letting it hang, crash or block the run.

A synchronous function runs in a worker process that is killed at the deadline and replaced. An asynchronous one is
awaited in the caller's event loop with the same deadline. The value it returns is passed on as it is: `as_reward` says,
where a reward is assigned, whether it is one.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import Any

from areal.api.errors import (
    RewardCrashed,
    RewardError,
    RewardInvalid,
    RewardLoadFailed,
    RewardOutOfMemory,
    RewardRaised,
    RewardTimeout,
)
from areal.config.errors import require
from areal.utils import waits
from areal.utils.callables import is_async, name_of
from areal.utils.logging import getLogger
from areal.utils.process_pool.pool import (
    SHARED,
    CallCrashed,
    CallError,
    CallExhausted,
    CallFailed,
    CallTimeout,
    Limits,
    LoadFailed,
    PackedFunction,
    ResultRefused,
)
from areal.utils.shorten import shown

__all__ = ["AsyncRewardWrapper", "Limits", "Outcome", "Reject", "Value", "as_reward", "python_scalar", "settings_of"]


@dataclass(frozen=True)
class Reject:
    """A failed call rejects its episode by a `RewardError`, of which there is a type for each way to fail."""


@dataclass(frozen=True)
class Value:
    """A failed call counts as this value."""

    value: Any


class Outcome(StrEnum):
    """How a call ended."""

    OK = "ok"
    """The function returned."""
    TIMEOUT = "timeout"
    """It was killed or cancelled at its deadline."""
    CRASH = "crash"
    """Its process ended during the call."""
    MEMORY = "memory"
    """It needed more memory than its process may use, so the process was ended."""
    LOAD = "load"
    """It never began: its module or its arguments raised while a process loaded them."""
    RESULT = "result"
    """It returned what is no data and could not be sent back."""
    EXCEPTION = "exception"
    """It raised."""
    RETRY = "retry"
    """A failed attempt that was followed by another; the call itself ends as one of the above."""


# The first that fits counts.
_OUTCOMES: tuple[tuple[type[CallError], Outcome, type[RewardError]], ...] = (
    (CallTimeout, Outcome.TIMEOUT, RewardTimeout),
    (CallExhausted, Outcome.MEMORY, RewardOutOfMemory),
    (CallCrashed, Outcome.CRASH, RewardCrashed),
    (LoadFailed, Outcome.LOAD, RewardLoadFailed),
    (ResultRefused, Outcome.RESULT, RewardInvalid),
    (CallFailed, Outcome.EXCEPTION, RewardRaised),
    (CallError, Outcome.CRASH, RewardCrashed),
)


def _check_machine(reward_fn: Callable[..., Any]) -> None:
    """A reward function that not every machine can run says so here, once, and not in every episode.

    Its attribute `check_machine` is called with the keywords that a `functools.partial` has set, and raises.
    """
    function, keywords = (reward_fn.func, reward_fn.keywords) if isinstance(reward_fn, partial) else (reward_fn, {})
    check = getattr(function, "check_machine", None)
    if check is not None:
        check(**keywords)


def settings_of(reward_fn: Callable[..., Any]) -> frozenset[str]:
    """The arguments that the keys of a task must not set, since they protect the machine: its attribute `settings`."""
    function = reward_fn.func if isinstance(reward_fn, partial) else reward_fn
    return frozenset(getattr(function, "settings", ()))


class AsyncRewardWrapper:
    """`await wrapper(*args, **kwargs)` is `reward_fn(*args, **kwargs)`, or a typed failure by the deadline.

    Cheap to make and picklable: worker processes are shared by all wrappers of a process and start with the first call.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 0,
        *,
        on_failure: Reject | Value = Reject(),
        limits: Limits | None = None,
    ) -> None:
        """`max_workers=None` is one process per core; `limits=None` gives each a fair share of the machine's memory."""
        require(callable(reward_fn), f"reward_fn must be callable, got {reward_fn!r}")
        require(timeout_seconds > 0, f"timeout_seconds must be > 0, got {timeout_seconds}")
        require(max_workers is None or max_workers >= 1, f"max_workers must be >= 1, got {max_workers}; None = cores")
        require(max_retries >= 0, f"max_retries must be >= 0, got {max_retries}")
        _check_machine(reward_fn)
        self.reward_fn = reward_fn
        self.timeout_seconds = timeout_seconds
        self.max_workers = max_workers
        self.max_retries = max_retries
        self.on_failure = on_failure
        self.limits = limits
        self.counts: Counter[str] = Counter()
        """Calls of this process by `Outcome`."""
        self._is_async = is_async(reward_fn)
        self._what = f"waits for its reward function {name_of(reward_fn)}"
        self._packed: PackedFunction | None = None

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attempt = self._await_in_loop if self._is_async else self._run_in_pool
        for retries_left in range(self.max_retries, -1, -1):
            try:
                with waits.current().entered(self._what, self.timeout_seconds, "its timeout_seconds"):
                    result = await attempt(*args, **kwargs)
            except CallError as error:
                failure = error
            else:
                self.counts[Outcome.OK] += 1
                return result
            if retries_left:
                self.counts[Outcome.RETRY] += 1
        return self._give_up(failure)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"counts": Counter(), "_packed": None}

    async def _run_in_pool(self, *args: Any, **kwargs: Any) -> Any:
        if self._packed is None:
            self._packed = PackedFunction.of(self.reward_fn)
        pool = SHARED.get(self.max_workers, self.limits)
        return await pool.run(self._packed, args, kwargs, timeout_seconds=self.timeout_seconds)

    async def _await_in_loop(self, *args: Any, **kwargs: Any) -> Any:
        name = name_of(self.reward_fn)
        deadline = asyncio.timeout(self.timeout_seconds)
        try:
            async with deadline:
                return await self.reward_fn(*args, **kwargs)
        except Exception as error:
            if deadline.expired() and isinstance(error, TimeoutError):
                raise CallTimeout(f"{name} was cancelled after {self.timeout_seconds:g} s") from error
            raise CallFailed(name, type(error).__qualname__, str(error)) from error

    def _give_up(self, failure: CallError) -> Any:
        outcome, rejection = next((outcome, error) for kind, outcome, error in _OUTCOMES if isinstance(failure, kind))
        self.counts[outcome] += 1
        if isinstance(self.on_failure, Value):
            if self.counts[outcome] == 1:
                text = "reward function failed (%s); this call and later ones that fail like it count as %r: %s"
                getLogger("reward").warning(text, outcome, self.on_failure.value, failure)
            return self.on_failure.value
        raise rejection(f"reward function {failure}") from failure


LARGEST_REWARD = (2 - 2**-23) * 2.0**127
"""The largest number that float32 holds, in which rewards are trained on."""


def as_reward(value: Any, source: str) -> float:
    """A reward as a float. Raises RewardInvalid, which names `source`, for what is not a finite number in float32.

    Bools and scalars of numpy and torch are numbers; text that looks like one is not.
    """
    plain = python_scalar(value)
    try:
        number = float(plain) if isinstance(plain, Real) else math.nan
    except OverflowError:
        number = 2 * LARGEST_REWARD  # an integer that no float holds
    if abs(number) <= LARGEST_REWARD:
        return number
    rule, remedy = "a finite number", "give an int, a float, a bool, or a 0-d array or tensor"
    if math.isfinite(number):
        rule, remedy = f"at most {LARGEST_REWARD:.3g} in size (float32)", "scale rewards down"
    raise RewardInvalid(f"a reward must be {rule}, got {type(value).__name__} {shown(value)} from {source}; {remedy}")


def python_scalar(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own, without need of either library; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
