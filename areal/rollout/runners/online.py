"""Episodes of agents that live outside this system: each waits for one to come, take its task, and give a reward.

An agent comes over HTTP with nothing but the proxy's address and the admin key; docs/online.md shows its three calls.
"""

import asyncio
from functools import partial
from typing import Any

from areal.api.errors import EpisodeTimeout, WorkflowError
from areal.api.messages import Episode
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.episodes import Digests
from areal.rollout.runners.agent import gather, harvest
from areal.utils import logging


class OutsideAgent:
    """What stands for such agents where a workflow is named."""

    async def run(self, data: dict[str, Any]) -> float:
        raise WorkflowError("this agent lives outside; set rollout.agent.mode=online")


class OnlineRunner:
    def __init__(self, name: str, proxy: Proxy, config: AgentConfig, gconfig: GenerationHyperparameters) -> None:
        """The proxy must be running."""
        self.name = name
        self._proxy = proxy
        self._config = config
        self._gconfig = gconfig
        proxy.desk.by_invitation = True

    def announce(self, *, with_key: bool) -> None:
        key = f" (admin key {self._proxy.admin_key})" if with_key else ""
        logging.getLogger("online").info("agents may come: POST %s/sessions%s", self._proxy.origin, key)

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        """The time runs from here: waiting for an agent, its session, and the wait for its reward."""
        sampling = self._gconfig.new(greedy=True) if greedy else self._gconfig
        try:
            async with asyncio.timeout(seconds):
                visit = await self._proxy.desk.expect(partial(self._proxy.open_session, gconfig=sampling), data)
        except TimeoutError:
            raise EpisodeTimeout(
                f"no agent took the task and rewarded it within {seconds:g} s (rollout.agent.timeout_seconds)"
            ) from None
        tree = visit.session.tree
        if visit.rejected:
            return harvest(tree, None, self.name, self._config), tree.digests
        return gather(tree, self._config), tree.digests
