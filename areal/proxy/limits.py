"""Hard caps of the proxy: what one client may take from the others."""

from dataclasses import dataclass

from areal.config.errors import ArealError


class SessionLimitReached(ArealError):
    """More sessions are open than allowed."""


@dataclass(frozen=True)
class ProxyLimits:
    max_sessions: int = 10_000
    """Sessions open at once."""
    max_calls_per_session: int = 64
    """Calls of one session running at once; one more is answered 429."""
    max_body_bytes: int = 16 * 2**20
    """Size of a request's body; a bigger one is answered 413."""
    max_choices: int = 128
    """Largest `n` of one request."""
    body_timeout_seconds: float = 30.0
    """Time a client may take to send its body."""
    call_timeout_seconds: float = 3600.0
    """Time the engine may take for one call; longer is answered 503."""
    remembered_ended_sessions: int = 10_000
    """Ended sessions whose keys answer 410; older ones answer 401 like keys that never were."""
