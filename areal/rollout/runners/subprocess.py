"""Episodes of an agent in processes of its own: one that crashes or hangs takes down nothing but its episode.

The agent is made once in each process and plays one episode at a time. It reaches its session over TCP, by the address
in its environment. An episode waits for a free process before its session is opened and its deadline begins. The parent
alone enforces the deadline: it kills the process, as it does when the episode is cancelled. What an episode sends back
is data, which the parent reads and never unpickles.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, final

from areal.api.errors import (
    AgentFailed,
    EpisodeRejected,
    EpisodeTimeout,
    RejectReason,
    RewardInvalid,
    WorkflowError,
)
from areal.api.messages import Episode
from areal.api.reward_api import python_scalar
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.episodes import TIMEOUT_SETTING, Digests, accepted_keywords, call, user_trace
from areal.rollout.loading import Fillers, WorkflowSpec, agent_function, load
from areal.rollout.runners.agent import client_environment, environment, rewarded_episode
from areal.utils import stats_tracker, waits
from areal.utils.process_pool.pool import (
    CallCrashed,
    CallError,
    CallFailed,
    CallTimeout,
    PackedFunction,
    ProcessPool,
    ResultRefused,
)

LOAD_SECONDS = 240.0
"""Starting a process and constructing the agent in it."""
READY_SECONDS = 30.0


class AgentPool:
    """The processes that all agents of a rollout worker share; belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self.processes = ProcessPool(size, load_seconds=LOAD_SECONDS)
        self.free = asyncio.Semaphore(size)

    @asynccontextmanager
    async def free_process(self) -> AsyncIterator[None]:
        """Wait for one; it is the caller's in this block."""
        with waits.current().entered("waits for a free process (rollout.agent.subproc_max_workers)"):
            await self.free.acquire()
        try:
            yield
        finally:
            self.free.release()

    async def run(self, agent: PackedFunction, task: "AgentTask | None", seconds: float) -> Any:
        """Raises CallError. Cancelling it kills the process."""
        return await asyncio.wrap_future(self.processes.submit(agent, (task,), timeout_seconds=seconds))

    async def aclose(self) -> None:
        """Kill every process."""
        await asyncio.to_thread(self.processes.close)


class SubprocessRunner:
    def __init__(
        self,
        name: str,
        agent: "PackedAgent",
        pool: AgentPool,
        proxy: Proxy,
        config: AgentConfig,
        gconfig: GenerationHyperparameters,
    ) -> None:
        """The proxy must be running."""
        self.name = name
        self._agent = replace(PackedFunction.of(agent), name=name)  # type: ignore[arg-type]  # callable when unpacked
        self._pool = pool
        self._proxy = proxy
        self._config = config
        self._gconfig = gconfig

    async def prepare(self) -> None:
        """Make the agent in a first process, so that one which cannot be made is refused before any episode."""
        try:
            await self._pool.run(self._agent, None, READY_SECONDS)
        except CallFailed as error:
            raise WorkflowError(error.text) from error
        except CallError as error:
            raise WorkflowError(f"the agent's process could not be set up: {error}") from error

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        async with self._pool.free_process():
            sampling = self._gconfig.new(greedy=True) if greedy else self._gconfig
            session = self._proxy.open_session(gconfig=sampling, seed=context.seed)
            task = AgentTask(data, context.is_eval, context.task_id, session.base_url, session.api_key, context.seed)
            try:
                with waits.current().entered("runs in a process of its own", seconds, TIMEOUT_SETTING):
                    outcome = await self._run(task, seconds)
            finally:
                await self._proxy.end_session(session)
        for name, values in outcome["stats"].items():
            for value in values:
                stats_tracker.scalar(**{name: value})
        return rewarded_episode(session.tree, outcome["reward"], self.name, self._config), session.tree.digests

    async def _run(self, task: "AgentTask", seconds: float) -> "AgentOutcome":
        try:
            outcome: AgentOutcome | AgentRejection = await self._pool.run(self._agent, task, seconds)
        except CallTimeout as error:
            raise EpisodeTimeout(f"{error} (rollout.agent.timeout_seconds={seconds:g})") from None
        except CallCrashed as error:
            raise AgentFailed(str(error)) from None
        except ResultRefused as error:
            raise RewardInvalid(str(error)) from None
        except CallFailed as error:
            raise AgentFailed(str(error)) from error
        if "reason" in outcome:
            rejected = EpisodeRejected(outcome["text"])
            rejected.reason = RejectReason(outcome["reason"])
            if outcome["trace"]:
                rejected.__cause__ = CallFailed(self.name, outcome["kind"], outcome["text"], outcome["trace"])
            raise rejected
        return outcome


@dataclass(frozen=True)
class AgentTask:
    """One episode on its way to an agent's process."""

    data: dict[str, Any]
    is_eval: bool
    task_id: int | None
    base_url: str
    api_key: str
    seed: int | None


@final
class AgentOutcome(TypedDict):
    """What an episode sends back from an agent's process."""

    reward: Any
    stats: dict[str, list[float]]
    """Every number that the episode recorded."""


@final
class AgentRejection(TypedDict):
    """The episode ended by an `EpisodeRejected`, whose type need not exist in the parent."""

    reason: str
    """A `RejectReason`."""
    kind: str
    text: str
    trace: str


@dataclass(frozen=True)
class PackedAgent:
    """An agent as it travels: unpickled in its process, it becomes an `AgentHost`, with the agent made."""

    workflow: bytes
    """A packed `WorkflowSpec`."""
    fillers: Fillers
    """With the tokenizer's path in place of the tokenizer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _host_agent, (self.workflow, self.fillers)


def _host_agent(workflow: bytes, fillers: Fillers) -> "AgentHost":
    return AgentHost(load(WorkflowSpec.unpack(workflow), fillers))


class AgentHost:
    """The agent in its own process, and what is called there for each episode."""

    def __init__(self, agent: Any) -> None:
        self._run = agent_function(agent)
        self._accepts = accepted_keywords(self._run)

    def __call__(self, task: AgentTask | None) -> AgentOutcome | AgentRejection | None:
        """Play an episode; None only asks whether the agent could be made."""
        if task is None:
            return None
        with environment(client_environment(task.base_url, task.api_key)):
            return asyncio.run(self._play(task))

    async def _play(self, task: AgentTask) -> AgentOutcome | AgentRejection:
        keywords = {name: getattr(task, name) for name in ("base_url", "api_key") if self._accepts(name)}
        context = WorkflowContext(task.is_eval, task.task_id, task.base_url, task.api_key, seed=task.seed)
        with workflow_context.enter(context), stats_tracker.collect() as stats:
            try:
                reward = await call(self._run, task.data, **keywords)
            except EpisodeRejected as error:
                return AgentRejection(
                    reason=error.reason.value,
                    kind=type(error).__qualname__,
                    text=str(error),
                    trace=user_trace(error.__cause__),
                )
        return AgentOutcome(reward=_plain(reward), stats=dict(stats.values))


def _plain(reward: Any) -> Any:
    """Any mapping as a dict, and scalars of numpy and torch as Python's own, so that the parent loads neither."""
    if isinstance(reward, Mapping):
        return {key: _plain(value) for key, value in reward.items()}
    return python_scalar(reward)
