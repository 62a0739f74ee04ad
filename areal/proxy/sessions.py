"""Sessions: each is a conversation space with its own key, budget and retries.

A session is named by its key or by the token in its base URL. Both are unguessable and belong to one session only. An
ended session's credentials are remembered for a while, so that a late call learns what happened.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from areal.config.errors import ArealError
from areal.config.rollout import GenerationHyperparameters, ProxyLimits
from areal.infra import tracing
from areal.infra.tracing import EpisodeTrace
from areal.proxy.errors import rate_limited, session_ended, unauthorized
from areal.proxy.requests import KnownBodies
from areal.proxy.retries import Retries
from areal.proxy.stored import StoredAnswers
from areal.trajectory.tree import Tree
from areal.utils.bounded_cache import BoundedCache
from areal.utils.seeds import CallSeeds
from areal.utils.waits import Waits, current

NO_SESSION_KEY = "areal-no-session"
"""The key of a client that was made without a session's; calls with it are answered with the remedy."""

REMEDY = (
    "pass base_url and api_key from the agent's extra_kwargs (or from workflow_context.get()) to the client, "
    "e.g. AsyncOpenAI(base_url=..., api_key=..., http_client=...)"
)


class SessionLimitReached(ArealError):
    """More sessions are open than allowed."""


class TokenBudget:
    """How many tokens the calls of one session may take. A running call sets aside what it may still take."""

    def __init__(self, limit: int | None) -> None:
        """None = any number."""
        self._limit = limit
        self._taken = 0

    @contextmanager
    def reserved(self, most: int) -> Iterator[list[int]]:
        """Put what was really taken into the list. Raises ApiError 429 if `most` is more than what is left."""
        if self._limit is not None and self._taken + most > self._limit:
            raise rate_limited(
                f"a session may take {self._limit} tokens, prompts and answers counted "
                f"(proxy.limits.max_tokens_per_session); {self._limit - self._taken} are left and this call may take "
                f"{most}",
                "token_limit_exceeded",
            )
        taken: list[int] = []
        self._taken += most
        try:
            yield taken
        finally:
            self._taken += sum(taken) - most


@dataclass(eq=False)
class Session:
    base_url: str
    api_key: str
    token: str
    tree: Tree
    gconfig: GenerationHyperparameters
    """Sampling settings, unless a request says otherwise."""
    retries: Retries
    budget: TokenBudget
    bodies: KnownBodies
    max_calls: int
    """At once."""
    calls: "dict[asyncio.Future[None], Callable[[], object]]" = field(default_factory=dict)
    """Its calls that are being answered: when each is over, and what ends it at once."""
    turns_kept: int | None = None
    """Beyond this many answers a permanent session drops its conversations and starts afresh; None = it never does."""
    stored: StoredAnswers = field(default_factory=StoredAnswers)
    instructed: set[str] = field(default_factory=set)
    """Ids of answers whose conversation begins with instructions that were given for them alone."""
    ended: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """What engines know it by; unlike its key and token it opens nothing."""
    waits: Waits = field(default_factory=current)
    """Of the episode that it belongs to."""
    trace: EpisodeTrace | None = field(default_factory=tracing.current)
    """The same; None = its calls have no spans."""
    seeds: CallSeeds | None = None
    """Where the seeds of its calls come from; None = the engine makes up one for each call that sets none."""

    def require_room_for_call(self) -> None:
        """Raises ApiError 410 or 429 if one more call may not begin."""
        if self.ended:
            raise session_ended()
        if len(self.calls) >= self.max_calls:
            raise rate_limited(
                f"a session may run {self.max_calls} calls at once (proxy.limits.max_calls_per_session); "
                "wait for one to finish",
                "rate_limit_exceeded",
            )


class Sessions:
    """The open sessions of a proxy."""

    def __init__(self, limits: ProxyLimits, remedy: str = REMEDY) -> None:
        """`remedy` says to whoever has no key where it comes from."""
        self._limits = limits
        self._remedy = remedy
        self._by_credential: dict[str, Session] = {}
        self._ended: BoundedCache[str, None] = BoundedCache(2 * limits.remembered_ended_sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter([session for name, session in self._by_credential.items() if name == session.token])

    def __len__(self) -> int:
        return len(self._by_credential) // 2

    def open(
        self,
        origin: str,
        tree: Tree,
        gconfig: GenerationHyperparameters,
        *,
        api_key: str | None = None,
        seed: int | None = None,
    ) -> Session:
        """`api_key` is one that was agreed upon; None = a new one. `seed` decides what its calls draw."""
        limits = self._limits
        if len(self) >= limits.max_sessions:
            raise SessionLimitReached(
                f"at most {limits.max_sessions} sessions may be open (proxy.limits.max_sessions); end some first"
            )
        random = secrets.token_hex(48)
        token, key = random[:48], api_key or f"sk-areal-{random[48:]}"
        assert not self.was_issued(key), "a key names one session"
        session = Session(
            base_url=f"{origin}/s/{token}/v1",
            api_key=key,
            token=token,
            tree=tree,
            gconfig=gconfig,
            retries=Retries(limits.remembered_answers),
            budget=TokenBudget(limits.max_tokens_per_session),
            bodies=KnownBodies(),
            max_calls=limits.max_calls_per_session,
            seeds=None if seed is None else CallSeeds(seed),
        )
        self._by_credential[token] = self._by_credential[key] = session
        return session

    def end(self, session: Session) -> None:
        session.ended = True
        for credential in (session.token, session.api_key):
            if self._by_credential.pop(credential, None) is not None:
                self._ended.put(credential, None)

    def identify(self, token: str | None, keys: list[str]) -> Session:
        """Of a request with this token in its path and these keys in its headers. Raises ApiError 401 or 410."""
        if token is not None:
            session = self._named(token, "the base_url names no session; " + self._remedy)
        else:
            session = self._named(next(filter(self.was_issued, keys), ""), _refusal(keys, self._remedy))
        for key in keys:
            if self.was_issued(key) and self._by_credential.get(key) is not session:
                raise unauthorized("the request's credentials belong to different sessions; " + self._remedy)
        return session

    def was_issued(self, key: str) -> bool:
        """Whether it is, or was, a session's."""
        return key in self._by_credential or key in self._ended

    def _named(self, credential: str, otherwise: str) -> Session:
        session = self._by_credential.get(credential)
        if session is not None:
            return session
        raise session_ended() if credential in self._ended else unauthorized(otherwise)


def _refusal(keys: list[str], remedy: str) -> str:
    if not keys:
        return "no key was sent (Authorization: Bearer KEY, or x-api-key: KEY); " + remedy
    if NO_SESSION_KEY in keys:
        return "this client was made without its session's key; " + remedy
    return "the key is not valid; " + remedy
