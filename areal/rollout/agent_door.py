"""Episodes of an agent: it talks to the policy through a session of the proxy, and returns a reward."""

import importlib.util
from dataclasses import replace
from typing import Any

from areal.api.messages import Episode
from areal.config.generation import GenerationHyperparameters
from areal.config.rollout import AgentConfig
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy, Session
from areal.rollout.episodes import Digests
from areal.rollout.harvest import harvest
from areal.rollout.naming import name_of
from areal.rollout.user_code import accepted_keywords, bounded, call
from areal.rollout.workflows import agent_function


class AgentDoor:
    def __init__(self, agent: Any, proxy: Proxy, config: AgentConfig, gconfig: GenerationHyperparameters) -> None:
        """The proxy must be running."""
        self.name = name_of(agent)
        self._run = agent_function(agent)
        self._accepts = accepted_keywords(self._run)
        self._proxy = proxy
        self._config = config
        self._gconfig = gconfig
        # Only some SDKs want it, so it need not be installed.
        self._httpx2_client = proxy.httpx2_client if importlib.util.find_spec("httpx2") else None

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, *, greedy: bool, seconds: float
    ) -> tuple[Episode | None, Digests]:
        session = self._proxy.open_session(gconfig=self._gconfig.new(greedy=True) if greedy else self._gconfig)
        inside = self._context(session, context)
        try:
            with workflow_context.enter(inside):
                keywords = self._keywords(inside)
                reward = await bounded(lambda: call(self._run, data, **keywords), seconds, self.name)
        finally:
            await self._proxy.end_session(session)
        return harvest(session.tree, reward, self.name, self._config), session.tree.digests

    def _context(self, session: Session, context: WorkflowContext) -> WorkflowContext:
        return replace(
            context,
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=self._proxy.http_client,
            httpx2_client=self._httpx2_client,
        )

    def _keywords(self, inside: WorkflowContext) -> dict[str, Any]:
        offered = ("base_url", "api_key", "http_client", "httpx2_client")
        return {name: getattr(inside, name) for name in offered if self._accepts(name)}
