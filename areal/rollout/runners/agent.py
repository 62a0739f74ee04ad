"""Episodes of an agent in this process: it talks to the policy through a session of the proxy, and returns a reward."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from areal.api.errors import NoInteractions
from areal.api.messages import Episode
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy, Session
from areal.rollout.episodes import Digests, accepted_keywords, bounded, call
from areal.rollout.loading import agent_function
from areal.trajectory import Tree, assign_reward, export, nodes_of, transcript
from areal.utils.callables import name_of
from areal.utils.net import bypass_proxies


class AgentRunner:
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
        sampling = self._gconfig.new(greedy=True) if greedy else self._gconfig
        session = self._proxy.open_session(gconfig=sampling, seed=context.seed)
        context = self._with_session(context, session)
        offered = ("base_url", "api_key", "http_client", "httpx2_client")
        keywords = {name: getattr(context, name) for name in offered if self._accepts(name)}
        try:
            with workflow_context.enter(context):
                reward = await bounded(lambda: call(self._run, data, **keywords), seconds, self.name)
        finally:
            await self._proxy.end_session(session)
        return rewarded_episode(session.tree, reward, self.name, self._config), session.tree.digests

    def _with_session(self, context: WorkflowContext, session: Session) -> WorkflowContext:
        return replace(
            context,
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=self._proxy.http_client,
            httpx2_client=self._httpx2_client,
        )


def rewarded_episode(tree: Tree, reward: Any, name: str, config: AgentConfig) -> Episode | None:
    """The episode of an agent called `name` that returned `reward`; None = it rejected the episode itself."""
    if reward is None and tree.last is not None:
        return None
    if reward is None:
        raise NoInteractions(f"{name} returned None and finished no call of the model")
    assign_reward(tree, reward, name)
    return episode_of(tree, config)


def episode_of(tree: Tree, config: AgentConfig) -> Episode:
    """The episode of a tree that has its rewards."""
    rows = export(tree, config.export_style, config.turn_discount)
    turns = [(node.asked_at, node.answered_at, len(node.output_ids)) for node in tree.completions]
    return Episode(rows, tree.reward, transcript(tree), calls=len(tree.completions), turns=turns, nodes=nodes_of(tree))


def client_environment(base_url: str, api_key: str) -> dict[str, str]:
    """The environment variables by which every SDK reaches one session; `base_url` ends in /v1."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # the older name, which some frameworks prefer
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # that SDK adds it itself
        "ANTHROPIC_API_KEY": api_key,
        **bypass_proxies(os.environ),
    }


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment; afterwards they are what they were before."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
