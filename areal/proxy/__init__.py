"""Let any agent talk to the policy over the wire format it already speaks.

Owns sessions and their keys, the HTTP app, reached over TCP or in process, and the dialects. Refuses to know what an
episode is, and never makes token ids itself: those belong to the trajectory.
"""

from typing import TYPE_CHECKING, Any

from areal.config.rollout import ProxyLimits
from areal.proxy.interactions import Interaction
from areal.proxy.proxy import Proxy
from areal.proxy.sessions import NO_SESSION_KEY, Session

if TYPE_CHECKING:
    from areal.proxy.direct_client import ArealOpenAI

__all__ = ["NO_SESSION_KEY", "ArealOpenAI", "Interaction", "Proxy", "ProxyLimits", "Session"]


def __getattr__(name: str) -> Any:
    """The direct client needs the OpenAI SDK, which nothing else here does."""
    if name == "ArealOpenAI":
        from areal.proxy.direct_client import ArealOpenAI

        return ArealOpenAI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
