"""The two ways to write an episode: in tokens (`RolloutWorkflow`), or as an agent that calls the model over HTTP
(`AgentWorkflow`).
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import InferenceEngine

if TYPE_CHECKING:
    import torch


class RolloutWorkflow(ABC):
    """An episode in tokens. One instance serves every episode of a process, concurrently."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "dict[str, torch.Tensor] | None":
        """Run one episode; return its tensors (batch first), or None to reject it."""


class AgentWorkflow:
    """A base for typing only: an agent is any class with this `run`; subclassing is optional."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """Run one episode against the model at `base_url`; return the reward, or rewards by completion id."""
        raise TypeError(f"{type(self).__name__} must define `async def run(self, data, **extra_kwargs)`")
