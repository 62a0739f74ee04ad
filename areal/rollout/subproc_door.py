"""Episodes of an agent in processes of its own: one that crashes or hangs takes down nothing but its episode.

The agent reaches its session over TCP. An episode waits for a free process before its session is opened and its
deadline begins; cancelling it kills the process.
"""

import asyncio
from dataclasses import replace
from typing import Any

from areal.api.errors import AgentFailed, EpisodeRejected, EpisodeTimeout, WorkflowError
from areal.api.messages import Episode
from areal.config.generation import GenerationHyperparameters
from areal.config.rollout import AgentConfig
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy, Session
from areal.rollout.agent_process import AgentParcel, AgentTask, Played, Refused
from areal.rollout.episodes import Digests
from areal.rollout.harvest import harvest
from areal.utils import stats_tracker
from areal.utils.process_pool import CallCrashed, CallError, CallFailed, CallTimeout, PackedFunction, ProcessPool

LOAD_SECONDS = 240.0
"""Starting a process and constructing the agent in it."""
READY_SECONDS = 30.0


class AgentPool:
    """The processes that all agents of a rollout worker share; belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self.processes = ProcessPool(size, load_seconds=LOAD_SECONDS)
        self.free = asyncio.Semaphore(size)

    async def run(self, agent: PackedFunction, task: AgentTask | None, seconds: float) -> Any:
        """Raises CallError. Cancelling it kills the process."""
        return await asyncio.wrap_future(self.processes.submit(agent, (task,), timeout_seconds=seconds))

    async def aclose(self) -> None:
        """Kill every process."""
        await asyncio.to_thread(self.processes.close)


class SubprocDoor:
    def __init__(
        self,
        name: str,
        parcel: AgentParcel,
        pool: AgentPool,
        proxy: Proxy,
        config: AgentConfig,
        gconfig: GenerationHyperparameters,
    ) -> None:
        """The proxy must be running."""
        self.name = name
        self._agent = replace(PackedFunction.of(parcel), name=name)  # type: ignore[arg-type]  # callable when unpacked
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
        async with self._pool.free:
            session = self._proxy.open_session(gconfig=self._gconfig.new(greedy=True) if greedy else self._gconfig)
            try:
                played = await self._run(_task(data, context, session), seconds)
            finally:
                await self._proxy.end_session(session)
        for name, values in played.stats.items():
            for value in values:
                stats_tracker.scalar(**{name: value})
        return harvest(session.tree, played.reward, self.name, self._config), session.tree.digests

    async def _run(self, task: AgentTask, seconds: float) -> Played:
        try:
            outcome: Played | Refused = await self._pool.run(self._agent, task, seconds)
        except CallTimeout as error:
            raise EpisodeTimeout(f"{error} (rollout.agent.timeout_seconds={seconds:g})") from None
        except CallCrashed as error:
            raise AgentFailed(str(error)) from None
        except CallFailed as error:
            raise AgentFailed(str(error)) from error
        if isinstance(outcome, Refused):
            raise self._rejection(outcome)
        return outcome

    def _rejection(self, refused: Refused) -> EpisodeRejected:
        rejection = EpisodeRejected(refused.text)
        rejection.reason = refused.reason
        if refused.trace:
            rejection.__cause__ = CallFailed(self.name, refused.kind, refused.text, refused.trace)
        return rejection


def _task(data: dict[str, Any], context: WorkflowContext, session: Session) -> AgentTask:
    return AgentTask(data, context.is_eval, context.task_id, session.base_url, session.api_key)
