"""Hard caps of the proxy: what one client may take from the others."""

# MERGED-DOC
# How many tokens the calls of one session may take. What a running call may still take is set aside for it.
# Sessions and who may speak in them. A session is named by its key or by the token in its base URL.
#
# Both are unguessable and belong to one session only. An ended session's credentials are remembered for a while, so that
# a late call learns what happened.

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from areal.config.errors import ArealError
from areal.config.rollout import GenerationHyperparameters, ProxyLimits
from areal.proxy.errors import ApiError, session_ended, unauthorized
from areal.proxy.retries import Retries
from areal.trajectory.tree import Tree

__all__ = ["ProxyLimits", "SessionLimitReached"]


class SessionLimitReached(ArealError):
    """More sessions are open than allowed."""


class Budget:
    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken = 0

    @contextmanager
    def reserved(self, most: int) -> Iterator[list[int]]:
        """Raises ApiError 429 where that many might be too many; put what was really taken into the list."""
        if self._limit is not None and self._taken + most > self._limit:
            raise _spent(self._limit, self._limit - self._taken, most)
        taken: list[int] = []
        self._taken += most
        try:
            yield taken
        finally:
            self._taken += sum(taken) - most


def _spent(limit: int, left: int, asked: int) -> ApiError:
    return ApiError(
        429,
        f"a session may take {limit} tokens, prompts and answers counted (proxy.limits.max_tokens_per_session); "
        f"{left} are left and this call may take {asked}",
        kind="rate_limit_error",
        code="token_limit_exceeded",
    )


NO_SESSION_KEY = "areal-no-session"
"""What a client sends that was made without this session's key; it names no session and is told the remedy."""

REMEDY = (
    "pass base_url and api_key from the agent's extra_kwargs (or from workflow_context.get()) to the client, "
    "e.g. AsyncOpenAI(base_url=..., api_key=..., http_client=...)"
)


@dataclass(eq=False)
class Session:
    base_url: str
    api_key: str
    token: str
    tree: Tree
    gconfig: GenerationHyperparameters
    """Sampling where a request says nothing."""
    retries: Retries
    budget: Budget
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """The tasks that answer its calls now."""
    turns_kept: int | None = None
    """A standing session forgets its conversations, and begins anew, beyond this many answers; None = it never does."""
    instructed: set[str] = field(default_factory=set)
    """Answers whose conversation begins with instructions that were given for them alone."""
    ended: bool = False


class Sessions:
    def __init__(self, limits: ProxyLimits) -> None:
        self._limits = limits
        self._by_credential: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter([session for name, session in self._by_credential.items() if name == session.token])

    def __len__(self) -> int:
        return len(self._by_credential) // 2

    def open(
        self, origin: str, tree: Tree, gconfig: GenerationHyperparameters, *, api_key: str | None = None
    ) -> Session:
        """`api_key` is one that was agreed upon; None = a new one."""
        if len(self) >= self._limits.max_sessions:
            raise SessionLimitReached(
                f"at most {self._limits.max_sessions} sessions may be open (proxy.limits.max_sessions); end some first"
            )
        random = secrets.token_hex(48)
        token, key = random[:48], api_key or f"sk-areal-{random[48:]}"
        assert not self.was_issued(key), "a key names one session"
        retries, budget = Retries(self._limits.remembered_answers), Budget(self._limits.max_tokens_per_session)
        session = Session(f"{origin}/s/{token}/v1", key, token, tree, gconfig, retries, budget)
        self._by_credential[token] = self._by_credential[key] = session
        return session

    def end(self, session: Session) -> None:
        session.ended = True
        for credential in (session.token, session.api_key):
            if self._by_credential.pop(credential, None) is not None:
                self._ended[credential] = None
        while len(self._ended) > 2 * self._limits.remembered_ended_sessions:
            self._ended.popitem(last=False)

    def identify(self, token: str | None, keys: list[str]) -> Session:
        """The session a request speaks for. `token` is that of its path; `keys` are those of its headers."""
        if token is not None:
            session = self._named(token, "the base_url names no session; " + REMEDY)
        else:
            session = self._named(next(filter(self.was_issued, keys), ""), _refusal(keys))
        for key in keys:
            if self.was_issued(key) and self._by_credential.get(key) is not session:
                raise unauthorized("the request's credentials belong to different sessions; " + REMEDY)
        return session

    def _named(self, credential: str, otherwise: str) -> Session:
        session = self._by_credential.get(credential)
        if session is not None:
            return session
        raise session_ended() if credential in self._ended else unauthorized(otherwise)

    def was_issued(self, key: str) -> bool:
        """Whether it is, or was, a session's."""
        return key in self._by_credential or key in self._ended


def _refusal(keys: list[str]) -> str:
    if not keys:
        return "no key was sent (Authorization: Bearer KEY, or x-api-key: KEY); " + REMEDY
    if NO_SESSION_KEY in keys:
        return "this client was made without its session's key; " + REMEDY
    return "the key is not valid; " + REMEDY


def too_many_calls(limit: int) -> ApiError:
    return ApiError(
        429,
        f"a session may run {limit} calls at once (proxy.limits.max_calls_per_session); wait for one to finish",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
    )
