"""Episodes of agents outside this system: each waits for one to ask for a session, take its task, and give a reward.

An agent needs nothing but the proxy's address and the admin key; docs/online.md shows the three HTTP calls it makes.
"""

import asyncio
from typing import Any

from areal.api.errors import EpisodeTimeout, WorkflowError
from areal.api.messages import Episode
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.infra import tracing
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy, Session
from areal.rollout.episodes import TIMEOUT_SETTING, Digests
from areal.rollout.runners.agent import episode_of, rewarded_episode
from areal.utils import logging, waits


class OutsideAgent:
    """Takes the place of such agents where a workflow is named."""

    async def run(self, data: dict[str, Any]) -> float:
        raise WorkflowError("this agent runs outside of AReaL; set rollout.agent.mode=online")


class OnlineRunner:
    def __init__(self, name: str, proxy: Proxy, config: AgentConfig, gconfig: GenerationHyperparameters) -> None:
        """The proxy must be running."""
        self.name = name
        self._proxy = proxy
        self._config = config
        self._gconfig = gconfig
        proxy.online.offers_only = True

    def announce(self, *, with_key: bool) -> None:
        """Log where agents ask for sessions; `with_key`: and the admin key they need."""
        key = f" (admin key {self._proxy.admin_key})" if with_key else ""
        logging.getLogger("online").info("agents may connect: POST %s/sessions%s", self._proxy.origin, key)

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        """`seconds` cover all of it: waiting for an agent, its session, and waiting for its reward."""
        sampling = self._gconfig.new(greedy=True) if greedy else self._gconfig
        here, trace = waits.current(), tracing.current()

        def open_session() -> Session:
            with waits.of(here), tracing.of(trace):  # it is opened by the call of an agent outside
                return self._proxy.open_session(gconfig=sampling, seed=context.seed)

        try:
            with here.entered("waits for an agent outside", seconds, TIMEOUT_SETTING):
                async with asyncio.timeout(seconds):
                    online = await self._proxy.online.offer(open_session, data)
        except TimeoutError:
            raise EpisodeTimeout(
                f"no agent took the task and rewarded it within {seconds:g} s ({TIMEOUT_SETTING})"
            ) from None
        tree = online.session.tree
        if online.rejected:
            return rewarded_episode(tree, None, self.name, self._config), tree.digests
        return episode_of(tree, self._config), tree.digests
