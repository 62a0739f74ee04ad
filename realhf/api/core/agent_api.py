"""What an agent is, and every name that one is written with."""

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from realhf.api.core.config import AgentAbstraction, EnvServiceAbstraction
from realhf.api.core.data_api import SequenceSample
from realhf.api.core.env_api import EnvironmentService, register_environment
from realhf.api.core.model_api import BundledGenerationOutputs, GenerationHyperparameters
from realhf.api.core.registry import AGENTS

__all__ = [
    "Agent",
    "AgentAbstraction",
    "BundledGenerationOutputs",
    "EnvServiceAbstraction",
    "EnvironmentService",
    "GenerationHyperparameters",
    "SequenceSample",
    "register_agent",
    "register_environment",
]


class Agent(ABC):
    """One object serves every episode of a process, concurrently: keep nothing of an episode on `self`."""

    @abstractmethod
    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: "asyncio.Queue[Any]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[SequenceSample] | None:
        """Put `(qid, token_ids, gconfig)`, get the answers, return what is to be trained on.

        An empty list rejects the episode. None keeps everything that was generated: the reward of the last `env.step`
        goes to the last answers, and from there to the turns before them by `rollout.agent.turn_discount`.
        """


def register_agent(name: str, agent_cls: type[Agent]) -> None:
    """Let configs call an agent by `name`."""
    AGENTS.register(name, agent_cls)
