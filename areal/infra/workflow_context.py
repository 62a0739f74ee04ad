"""What code inside an episode may ask: which episode this is, where its model is, and the HTTP clients that all share.

An episode's context is visible in its tasks and in threads started with `asyncio.to_thread`. Outside an episode `get()`
returns a context with the defaults below.
"""

from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.infra.http_clients import close_clients, shared_clients
from areal.utils.assigned import Assigned

if TYPE_CHECKING:
    import aiohttp
    import httpx

__all__ = [
    "WorkflowContext",
    "close_clients",
    "enter",
    "get",
    "get_aiohttp_session",
    "get_httpx_client",
    "of",
    "stat_scope",
]


@dataclass(frozen=True)
class WorkflowContext:
    is_eval: bool = False
    """The episode measures the policy and is not trained on."""
    task_id: int | None = None
    """The task this episode is a sample of; None outside an episode."""
    base_url: str = ""
    """Where the episode's model answers; empty outside an agent's episode."""
    api_key: str = ""
    http_client: "httpx.AsyncClient | None" = None
    """Reaches the model without the network, and everything else over it."""
    httpx2_client: Any = None
    """The same for SDKs that want an `httpx2.AsyncClient`."""
    workflow: str = ""
    """The name of the workflow that runs the episode."""
    seed: int | None = None
    """Follows from the run's seed, the task and the sample, for code that draws random numbers; None outside a run."""


_current: ContextVar[WorkflowContext | None] = ContextVar("areal_workflow_context", default=None)


def get() -> WorkflowContext:
    """The context of the episode that is running here."""
    return _current.get() or WorkflowContext()


def of(context: Context) -> WorkflowContext:
    """The same for code that runs under `context`, asked from elsewhere."""
    return context.get(_current) or WorkflowContext()


def stat_scope() -> str:
    """The name to record statistics under: `stats_tracker.get(workflow_context.stat_scope())`."""
    return "eval-rollout" if get().is_eval else "rollout"


def enter(context: WorkflowContext) -> Assigned[WorkflowContext]:
    """Run an episode's code under `context`."""
    return Assigned(_current, context)


async def get_aiohttp_session() -> "aiohttp.ClientSession":
    """The loop's shared session; do not close it."""
    return (await shared_clients()).aiohttp_session()


async def get_httpx_client() -> "httpx.AsyncClient":
    """The loop's shared client, in an agent's episode the one it was given; do not close it."""
    return get().http_client or (await shared_clients()).httpx_client()
