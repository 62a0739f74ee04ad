"""The environment as one episode sees it: every call goes through as it is, and the last reward is remembered."""

import math
import numbers
from typing import Any

from areal.api.errors import RewardInvalid
from realhf.api.core.env_api import EnvironmentService


class WatchedEnvironment(EnvironmentService):
    def __init__(self, env: EnvironmentService) -> None:
        self._env = env
        self._steps: list[Any] = []
        """The latest step's result; empty before the first."""

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        return await self._env.reset(*args, **kwargs)

    async def step(self, *args: Any, **kwargs: Any) -> Any:
        result = await self._env.step(*args, **kwargs)
        self._steps[:] = [result]
        return result

    def last_rewards(self, count: int, name: str) -> list[float]:
        """What the last step's second entry gives to each of `count` answers."""
        if not self._steps:
            raise RewardInvalid(
                f"{name} returned None without a call of env.step, so there is no reward; "
                "return a list of SequenceSample, empty to reject the episode"
            )
        (result,) = self._steps
        if not isinstance(result, tuple) or len(result) < 2:
            raise RewardInvalid(
                f"{name} returned None, and env.step gave {result!r:.200}; a step's second entry is the reward"
            )
        rewards = result[1].tolist() if hasattr(result[1], "tolist") else result[1]
        each = [_plain(one) for one in (rewards if isinstance(rewards, list | tuple) else [rewards] * count)]
        if len(each) != count or not all(isinstance(one, numbers.Real) and math.isfinite(one) for one in each):
            raise RewardInvalid(
                f"{name} returned None, and env.step gave the reward {result[1]!r:.200}; it must be a finite "
                f"number, or one for each of {count} answers"
            )
        return [float(one) for one in each]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def _plain(number: Any) -> Any:
    """numpy and torch scalars are numbers too."""
    return number.item() if getattr(number, "ndim", None) == 0 else number
