"""Hard caps of the proxy: what one client may take from the others."""

from areal.config.errors import ArealError
from areal.config.proxy import ProxyLimits

__all__ = ["ProxyLimits", "SessionLimitReached"]


class SessionLimitReached(ArealError):
    """More sessions are open than allowed."""
