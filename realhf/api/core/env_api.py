"""What an agent acts in."""

from abc import ABC, abstractmethod
from typing import Any

from realhf.api.core.registry import ENVIRONMENTS


class EnvironmentService(ABC):
    """One object serves every episode of a process, concurrently: keep an episode's state under its qid."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # noqa: B027
        """Begin anew; for an environment without state there is nothing to do."""

    @abstractmethod
    async def step(self, action: Any) -> Any:
        """Judge `(qid, answers)`. What this returns reaches the agent as it is: `(obs, reward, terminated, truncated,
        info)`, or any tuple whose second entry is the reward, one number per answer or one for all."""


def register_environment(name: str, env_cls: type[EnvironmentService]) -> None:
    """Let configs call an environment by `name`."""
    ENVIRONMENTS.register(name, env_cls)
