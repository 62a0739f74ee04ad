"""The proxy that agents talk through: what it tolerates, and what one client may take from the others."""

from dataclasses import dataclass, field, fields

from areal.config.errors import require
from areal.utils.loopback import is_loopback


@dataclass
class ProxyLimits:
    max_sessions: int = 10_000
    """Sessions open at once."""
    max_calls_per_session: int = 64
    """Calls of one session running at once; one more is answered 429."""
    max_tokens_per_session: int | None = None
    """Tokens that the calls of one session may take, prompts and answers counted; a call that might take more is
    answered 429. None = no limit."""
    max_body_bytes: int = 16 * 2**20
    """Size of a request's body; a bigger one is answered 413."""
    max_choices: int = 128
    """Largest `n` of one request."""
    body_timeout_seconds: float = 30.0
    """Time a client may take to send the head of a request, and then its body."""
    call_timeout_seconds: float = 3600.0
    """Time the engine may take for one call; longer is answered 503."""
    session_timeout_seconds: float = 3600.0
    """Time that a session opened over HTTP may stay open before it is ended for its agent."""
    reward_timeout_seconds: float = 600.0
    """Time behind the end of such a session in which its reward may still come."""
    remembered_answers: int = 64
    """Answers of a session that a retry is given again; one of an older call is a new sample."""
    remembered_ended_sessions: int = 10_000
    """Ended sessions whose keys answer 410; older ones answer 401 like keys that never were."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is None:
                continue
            least = 0 if limit.name == "remembered_ended_sessions" else 1
            timed = limit.name.endswith("_seconds")
            require(
                value > 0 if timed else value >= least,
                f"{limit.name} must be {'> 0 seconds' if timed else f'>= {least}'}, got {value}",
            )


@dataclass
class ProxyConfig:
    host: str = "127.0.0.1"
    """Address that the proxy of a rollout worker listens on; beyond loopback it needs an admin_key."""
    port: int = 0
    """0 = a free one for each worker."""
    admin_key: str = ""
    """Manages sessions over HTTP and calls no model; empty = one is made for the run."""
    drop_params: bool = False
    """Go on without request parameters that cannot be honoured, with a line in the log, instead of answering 400."""
    tool_parser: str | None = None
    """How the model writes tool calls: hermes, qwen3_coder, llama3, mistral, …; None = as its chat template does."""
    reasoning_parser: str | None = None
    """How it marks thinking: think, mistral, or none = thinking is text; None = as its chat template does."""
    limits: ProxyLimits = field(default_factory=ProxyLimits)

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must lie in [0, 65535], got {self.port}; use 0 for a free one")
        require(
            is_loopback(self.host) or self.admin_key != "",
            f"host={self.host} lets other machines in and needs an explicit admin_key; set one, or use 127.0.0.1",
        )
