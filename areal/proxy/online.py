"""Sessions for agents outside this process, which open, reward and end them over HTTP.

A session is complete once it has ended and has its reward, in either order: the reward may come later, up to a
deadline. If `offers_only` is set, sessions are handed out only for tasks that `offer` has on offer.

The routes need the admin key, which calls no model:

    POST   /sessions               -> {"session_id", "base_url", "api_key", "task"}
    POST   /sessions/ID/reward     {"reward": number | {completion id: number} | null}
    POST   /sessions/ID/end        or DELETE /sessions/ID

A session's own key manages nothing, unless `self_reward` lets it reward and end its own session.
"""

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from areal.api.errors import EpisodeTimeout, NoInteractions, RewardInvalid, RewardTimeout
from areal.config.rollout import ProxyLimits
from areal.proxy.errors import ApiError, bad_request, rate_limited, unauthorized
from areal.proxy.requests import parse_object, read_body, read_head
from areal.proxy.sessions import Session, SessionLimitReached, Sessions
from areal.trajectory import assign_reward
from areal.utils import waits
from areal.utils.bounded_cache import BoundedCache
from areal.utils.shorten import shown

OpenSession = Callable[[], Session]


@dataclass(eq=False)
class OnlineSession:
    """A session and what its agent has reported about it."""

    id: str
    session: Session
    task: Any
    """What the agent is to work on; None = its own business."""
    outcome: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """True = rewarded; False = the agent rejected it; or EpisodeTimeout, RewardTimeout."""
    rewarded: bool = False
    rejected: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Offer:
    """A task that waits for an agent."""

    open: OpenSession
    task: Any
    taken: asyncio.Future[OnlineSession]


class OnlineSessions:
    """The online sessions that are not complete, and the tasks on offer."""

    def __init__(
        self, open_session: OpenSession, end_session: Callable[[Session], Awaitable[None]], limits: ProxyLimits
    ) -> None:
        self.offers_only = False
        self._open = open_session
        self._end = end_session
        self._limits = limits
        self._by_id: dict[str, OnlineSession] = {}
        self._completed_ids: BoundedCache[str, None] = BoundedCache(limits.remembered_ended_sessions)
        self._offers: deque[_Offer] = deque()
        self._ending: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self) -> OnlineSession:
        """Raises ApiError 429 if too many are open, or there is nothing to do."""
        if len(self._by_id) >= self._limits.max_sessions:  # ended ones that wait for a reward count too
            raise _none_available(
                f"at most {self._limits.max_sessions} sessions may be open (proxy.limits.max_sessions)"
            )
        while self._offers:
            offer = self._offers.popleft()
            if not offer.taken.done():  # it may have been withdrawn
                online = self._begin(offer.open, offer.task)
                offer.taken.set_result(online)
                return online
        if self.offers_only:
            raise _none_available("no task is waiting for an agent now")
        return self._begin(self._open, None)

    async def offer(self, open_session: OpenSession, task: Any) -> OnlineSession:
        """Offer a task to the next agent that asks for a session, and wait until that session is complete.

        Raises EpisodeTimeout or RewardTimeout. Cancelling it ends the session.
        """
        offer = _Offer(open_session, task, asyncio.get_running_loop().create_future())
        self._offers.append(offer)
        try:
            with waits.current().entered("waits for an agent outside to take the task"):
                online = await offer.taken
            with waits.current().entered(lambda: _awaited_of(online)):
                await online.outcome
        finally:
            if offer.taken.done() and not offer.taken.cancelled():  # it may be taken in the moment of a cancellation
                await self._close(offer.taken.result())
        return online

    def find(self, session_id: str) -> OnlineSession:
        """Raises ApiError 404 or 409."""
        online = self._by_id.get(session_id)
        if online is not None:
            return online
        if session_id in self._completed_ids:
            raise ApiError(409, "this session is complete, or its deadline has passed", code="session_complete")
        raise ApiError(404, "there is no such session", code="session_not_found")

    def find_own(self, session_id: str, keys: list[str]) -> OnlineSession | None:
        """The session, if one of the keys is its own."""
        online = self._by_id.get(session_id)
        if online is None:
            return None
        key = online.session.api_key.encode()
        return online if any(hmac.compare_digest(sent.encode(), key) for sent in keys) else None

    def reward(self, online: OnlineSession, reward: Any) -> None:
        """A number goes to the answer that finished last, a dict maps answers' ids to rewards, None rejects."""
        if reward is None:
            online.rejected = True
        else:
            try:
                assign_reward(online.session.tree, reward, "the agent")
            except RewardInvalid as error:
                raise bad_request(str(error), "reward") from None
            except NoInteractions as error:
                raise ApiError(409, str(error), param="reward", code="no_interactions") from None
        online.rewarded = True
        self._check_complete(online)

    async def end(self, online: OnlineSession) -> None:
        """Returns once its calls are aborted. A reward may still come."""
        if online.session.ended:
            return
        seconds = self._limits.reward_timeout_seconds
        self._set_timer(online, seconds, RewardTimeout(f"no reward came within {seconds:g} s after the session's end"))
        await self._end(online.session)
        self._check_complete(online)

    async def aclose(self) -> None:
        for online in list(self._by_id.values()):
            await self._close(online)
        await asyncio.gather(*self._ending)

    def _begin(self, open_session: OpenSession, task: Any) -> OnlineSession:
        online = OnlineSession(f"sess-{secrets.token_hex(12)}", open_session(), task)
        self._by_id[online.id] = online
        seconds = self._limits.session_timeout_seconds
        self._set_timer(online, seconds, EpisodeTimeout(f"the session was not ended within {seconds:g} s"))
        return online

    def _set_timer(self, online: OnlineSession, seconds: float, failure: Exception) -> None:
        if online.timer is not None:
            online.timer.cancel()
        online.timer = asyncio.get_running_loop().call_later(seconds, self._expire, online, failure)

    def _expire(self, online: OnlineSession, failure: Exception) -> None:
        if not online.outcome.done():
            online.outcome.set_exception(failure)
            online.outcome.exception()  # marks it as retrieved: it may have no reader
        ending = asyncio.ensure_future(self._close(online))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _check_complete(self, online: OnlineSession) -> None:
        if online.session.ended and online.rewarded and not online.outcome.done():
            online.outcome.set_result(not online.rejected)
            self._forget(online)

    async def _close(self, online: OnlineSession) -> None:
        self._forget(online)
        online.outcome.cancel()
        await self._end(online.session)

    def _forget(self, online: OnlineSession) -> None:
        if online.timer is not None:
            online.timer.cancel()
        if self._by_id.pop(online.id, None) is not None:
            self._completed_ids.put(online.id, None)


def _awaited_of(online: OnlineSession) -> str:
    if online.session.calls:
        return "waits for the model, which its agent outside has called"
    missing = "reward" if online.session.ended else "next call, reward or end"
    return f"waits for the {missing} of its agent outside ({len(online.session.tree.completions)} calls were answered)"


def _none_available(message: str) -> ApiError:
    return rate_limited(f"{message}; ask again later", "no_session_available")


class SessionRoutes:
    """The endpoints that manage online sessions."""

    def __init__(
        self,
        online: OnlineSessions,
        sessions: Sessions,
        limits: ProxyLimits,
        admin_key: str,
        self_reward: bool,
        public_url: str = "",
    ) -> None:
        """`public_url` is where agents reach the proxy; empty = the address that they connected to."""
        self._online = online
        self._sessions = sessions
        self._limits = limits
        self._admin_key = admin_key
        self._self_reward = self_reward
        self._public_url = public_url.rstrip("/")

    def endpoints(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        return [
            ("POST", "/sessions", self._open),
            ("POST", "/sessions/{id}/reward", self._reward),
            ("POST", "/sessions/{id}/end", self._end),
            ("DELETE", "/sessions/{id}", self._end),
        ]

    async def _open(self, request: Request) -> Response:
        self._require_admin(read_head(request.scope["headers"]).keys)
        raw = await read_body(request.receive, self._limits)
        if raw and (body := parse_object(raw)):
            raise bad_request(f"a session takes no settings, got {shown(', '.join(sorted(body)))}; send an empty body")
        try:
            online = self._online.open()
        except SessionLimitReached as error:
            raise rate_limited(str(error), "no_session_available") from None
        session = online.session
        base_url = f"{self._public_url or _address_reached(request)}/s/{session.token}/v1"
        answer = {"session_id": online.id, "base_url": base_url, "api_key": session.api_key, "task": online.task}
        return _json(answer, 201)

    async def _reward(self, request: Request) -> Response:
        online = self._managed(request)
        body = parse_object(await read_body(request.receive, self._limits))
        if set(body) != {"reward"}:
            raise bad_request(f'the body must be {{"reward": …}} and nothing else, got {shown(sorted(body))}', "reward")
        # Found again, because it may have become complete while the body was read.
        self._online.reward(self._online.find(online.id), body["reward"])
        return _state(online)

    async def _end(self, request: Request) -> Response:
        online = self._managed(request)
        await read_body(request.receive, self._limits)
        await self._online.end(online)
        return _state(online)

    def _managed(self, request: Request) -> OnlineSession:
        """Keys are checked first: an unauthorised caller cannot tell whether the session exists."""
        keys = read_head(request.scope["headers"]).keys
        session_id = request.path_params["id"]
        if self._self_reward and (own := self._online.find_own(session_id, keys)) is not None:
            return own
        self._require_admin(keys)
        return self._online.find(session_id)

    def _require_admin(self, keys: list[str]) -> None:
        if any(hmac.compare_digest(key.encode(), self._admin_key.encode()) for key in keys):
            return
        if any(self._sessions.was_issued(key) for key in keys):
            raise ApiError(
                403,
                "a session's key may call the model and nothing else; use the admin key, or set "
                "rollout.agent.self_reward to let sessions reward themselves",
                kind="permission_error",
                code="forbidden",
            )
        raise unauthorized("managing sessions needs the admin key (Authorization: Bearer KEY, or x-api-key: KEY)")


def _address_reached(request: Request) -> str:
    """The address that the caller connected to: the bound one may be 0.0.0.0, and `Host` is the caller's own word."""
    host, port = request.scope["server"]
    shown_host = f"[{host}]" if ":" in host else host
    return f"http://{shown_host}" if port is None else f"http://{shown_host}:{port}"


def _state(online: OnlineSession) -> Response:
    state = {
        "session_id": online.id,
        "ended": online.session.ended,
        "rewarded": online.rewarded,
        "completions": [completion.id for completion in online.session.tree.completions if not completion.lost],
    }
    return _json(state, 200)


def _json(value: object, status: int) -> Response:
    return Response(orjson.dumps(value, default=str), status, media_type="application/json")
