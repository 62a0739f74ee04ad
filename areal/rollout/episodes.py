"""One episode, whichever door it goes through, ends as an `Episode` or as a `Rejection` with its reason.

User code is bounded here: by a deadline, by the session it talks through, and by what it may return.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from areal.api.engine_api import InferenceEngine
from areal.api.errors import AgentFailed, EpisodeRejected, EpisodeTimeout, NoInteractions
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.messages import Episode, Rejection, Row
from areal.api.rejection import RejectReason
from areal.config.generation import GenerationHyperparameters
from areal.config.rollout import AgentConfig
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.tensors import rows_of
from areal.rollout.workflows import agent_function, name_of
from areal.trajectory import assign_reward, export, transcript
from areal.utils import stats_tracker

Digests = dict[int, str]
"""The weights behind an episode: version -> digest."""


class Door(Protocol):
    """A way to run episodes of one workflow."""

    name: str

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, greedy: bool
    ) -> tuple[Episode | None, Digests]:
        """Run user code to its end; None = it rejected the episode itself."""
        ...


async def run_episode(
    door: Door, data: dict[str, Any], context: WorkflowContext, greedy: bool, seconds: float
) -> tuple[Episode | Rejection, Digests]:
    """Never raises but when cancelled from outside."""
    began = time.monotonic()
    try:
        with stats_tracker.collect() as stats:
            episode, digests = await _bounded(door, data, context, greedy, seconds)
    except EpisodeRejected as error:
        return Rejection(error.reason, str(error), _user_trace(error)), {}
    if episode is None:
        return Rejection(RejectReason.FILTERED, f"{door.name} returned None"), digests
    episode.stats = stats.means()
    episode.seconds = time.monotonic() - began
    return episode, digests


async def _bounded(
    door: Door, data: dict[str, Any], context: WorkflowContext, greedy: bool, seconds: float
) -> tuple[Episode | None, Digests]:
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await door.play(data, context, greedy)
    except EpisodeRejected:
        raise
    except Exception as error:
        if deadline.expired():
            raise EpisodeTimeout(f"{door.name} took longer than rollout.agent.timeout_seconds={seconds:g}") from error
        raise AgentFailed(f"{door.name} raised {type(error).__name__}: {error}") from error


def _user_trace(error: EpisodeRejected) -> str:
    cause = error.__cause__
    if cause is None:
        return ""
    remote = getattr(cause, "trace", "")
    return remote or "".join(traceback.format_exception(cause))


class AgentDoor:
    """An agent that talks to the policy through a session of the proxy."""

    def __init__(self, agent: Any, proxy: Proxy, config: AgentConfig, gconfig: GenerationHyperparameters) -> None:
        self.name = name_of(agent)
        self._run = agent_function(agent)
        self._accepted = _accepted_keywords(self._run)
        self._proxy = proxy
        self._config = config
        self._gconfig = gconfig

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, greedy: bool
    ) -> tuple[Episode | None, Digests]:
        session = self._proxy.open_session(gconfig=self._gconfig.new(greedy=True) if greedy else self._gconfig)
        inside = WorkflowContext(
            is_eval=context.is_eval,
            task_id=context.task_id,
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=self._proxy.http_client,
            httpx2_client=self._proxy.httpx2_client,
        )
        try:
            with workflow_context.enter(inside):
                reward = await self._call(data, inside)
        finally:
            await self._proxy.end_session(session)
        tree = session.tree
        if reward is None:
            return None, tree.digests
        assign_reward(tree, reward, self.name)
        rows = export(tree, self._config.export_style, self._config.turn_discount)
        episode = Episode(rows, tree.reward, transcript(tree), calls=len(tree.completions))
        return episode, tree.digests

    async def _call(self, data: dict[str, Any], context: WorkflowContext) -> Any:
        offered = {
            "base_url": context.base_url,
            "api_key": context.api_key,
            "http_client": context.http_client,
            "httpx2_client": context.httpx2_client,
        }
        kwargs = {key: value for key, value in offered.items() if self._accepted(key)}
        if inspect.iscoroutinefunction(self._run) or inspect.iscoroutinefunction(getattr(self._run, "__call__", None)):  # noqa: B004
            return await self._run(data, **kwargs)
        result = await asyncio.to_thread(self._run, data, **kwargs)
        return await result if inspect.isawaitable(result) else result


def _accepted_keywords(function: Callable[..., Any]) -> Callable[[str], bool]:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return lambda key: takes_all or key in parameters


class WorkflowDoor:
    """A RolloutWorkflow that calls the engine itself."""

    def __init__(self, workflow: Any, engine: InferenceEngine, tokenizer: Any) -> None:
        self.name = name_of(type(workflow))
        self._workflow = workflow
        self._engine = engine
        self._tokenizer = tokenizer

    async def play(
        self, data: dict[str, Any], context: WorkflowContext, greedy: bool
    ) -> tuple[Episode | None, Digests]:
        witness = WitnessedEngine(self._engine, greedy)
        with workflow_context.enter(context):
            result = await self._workflow.arun_episode(witness, data)
        if result is None:
            return None, witness.digests
        if not witness.calls:
            raise NoInteractions(f"{self.name} returned a trajectory but never called the engine")
        rows = rows_of(result, self.name)
        for row in rows:
            if row.recompute_logprobs:  # the short form says nothing of versions; the engine did
                row.versions[row.loss_mask] = min(witness.digests, default=-1)
        messages = [message for row in rows for message in self._readable(row)]
        return Episode(rows, sum(row.reward for row in rows), messages, calls=witness.calls), witness.digests

    def _readable(self, row: Row) -> list[dict[str, Any]]:
        """A row as a person reads it: stretches of prompt and of sampled tokens."""
        edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
        stretches = [
            {
                "role": "assistant" if row.loss_mask[part[0]] else "prompt",
                "content": self._tokenizer.decode(row.input_ids[part]),
            }
            for part in np.split(np.arange(len(row.input_ids)), edges)
        ]
        stretches[-1]["reward"] = row.reward
        return stretches


class WitnessedEngine:
    """The engine as a workflow sees it: every call is counted, and what produced its tokens is noted."""

    def __init__(self, engine: InferenceEngine, greedy: bool) -> None:
        self._engine = engine
        self._greedy = greedy
        self.calls = 0
        self.digests: dict[int, str] = {}

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        if self._greedy:
            req = ModelRequest(req.rid, req.input_ids, req.gconfig.new(greedy=True), req.tokenizer)
        response = await self._engine.agenerate(req)
        self.calls += 1
        self.digests |= response.digests
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
