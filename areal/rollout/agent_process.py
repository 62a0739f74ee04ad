"""What runs in an agent's own process: the agent, made once, and its episodes, one at a time.

Owns the environment an episode's clients read and the way its outcome travels back. Refuses to decide about deadlines:
the parent kills the process.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.api.errors import EpisodeRejected
from areal.api.rejection import RejectReason
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.rollout.client_environment import client_environment, environment
from areal.rollout.constructor import Fillers
from areal.rollout.episodes import user_trace
from areal.rollout.user_code import accepted_keywords, call
from areal.rollout.workflows import WorkflowSpec, agent_function, load
from areal.utils import stats_tracker


@dataclass(frozen=True)
class AgentTask:
    """One episode on its way to an agent's process."""

    data: dict[str, Any]
    is_eval: bool
    task_id: int | None
    base_url: str
    api_key: str


@dataclass(frozen=True)
class Played:
    reward: Any
    stats: dict[str, list[float]]
    """Every number that the episode recorded."""


@dataclass(frozen=True)
class Refused:
    """The episode ended by an `EpisodeRejected`, whose type need not exist in the parent."""

    reason: RejectReason
    kind: str
    text: str
    trace: str


@dataclass(frozen=True)
class AgentParcel:
    """An agent as it travels: where it is unpickled it becomes an `AgentRunner`, with the agent made."""

    workflow: bytes
    fillers: Fillers
    """With the tokenizer's path in place of the tokenizer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.workflow, self.fillers)


class AgentRunner:
    def __init__(self, agent: Any) -> None:
        self._run = agent_function(agent)
        self._accepts = accepted_keywords(self._run)

    def __call__(self, task: AgentTask | None) -> Played | Refused | None:
        """Play an episode; None asks for nothing more than that the agent is there."""
        if task is None:
            return None
        with environment(client_environment(task.base_url, task.api_key)):
            return asyncio.run(self._play(task))

    async def _play(self, task: AgentTask) -> Played | Refused:
        keywords = {name: getattr(task, name) for name in ("base_url", "api_key") if self._accepts(name)}
        context = WorkflowContext(task.is_eval, task.task_id, task.base_url, task.api_key)
        with workflow_context.enter(context), stats_tracker.collect() as stats:
            try:
                reward = await call(self._run, task.data, **keywords)
            except EpisodeRejected as error:
                return Refused(error.reason, type(error).__qualname__, str(error), user_trace(error.__cause__))
        return Played(_plain(reward), dict(stats.values))


def _open(workflow: bytes, fillers: Fillers) -> AgentRunner:
    return AgentRunner(load(WorkflowSpec.unpack(workflow), fillers))


def _plain(reward: Any) -> Any:
    """Scalars of numpy and torch as Python's own, so that the parent needs neither library to read them."""
    if isinstance(reward, Mapping):
        return {key: _plain(value) for key, value in reward.items()}
    return reward.item() if hasattr(reward, "item") and getattr(reward, "ndim", None) == 0 else reward
