"""Sessions for agents outside this process: opened, rewarded and ended by somebody who speaks HTTP.

A session is complete when it has ended and has its reward, in either order: the reward may come later, up to a
deadline. Where the desk is by invitation, sessions are handed out only as `expect` asks for them, each with its task.
"""

# MERGED-DOC
# The routes that manage sessions, for agents outside this process. They need the admin key, which calls no model.
#
#     POST   /sessions               -> {"session_id", "base_url", "api_key", "task"}
#     POST   /sessions/ID/reward     {"reward": number | {completion id: number} | null}
#     POST   /sessions/ID/end        or DELETE /sessions/ID
#
# A session's own key manages nothing, unless `self_reward` lets it reward and end its own session.

import asyncio
import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from areal.api.errors import EpisodeTimeout, NoInteractions, RewardInvalid, RewardTimeout
from areal.proxy.errors import ApiError, bad_request, unauthorized
from areal.proxy.requests import keys_of, parse_object, read_body
from areal.proxy.sessions import ProxyLimits, Session, SessionLimitReached, Sessions
from areal.trajectory import assign_reward

OpenSession = Callable[[], Session]


@dataclass(eq=False)
class OnlineSession:
    """A session and what its agent has said about it."""

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
class _Invitation:
    open: OpenSession
    task: Any
    visit: asyncio.Future[OnlineSession]


class OnlineSessions:
    def __init__(
        self, open_session: OpenSession, end_session: Callable[[Session], Awaitable[None]], limits: ProxyLimits
    ) -> None:
        self._open = open_session
        self._end = end_session
        self._limits = limits
        self._visits: dict[str, OnlineSession] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._invitations: deque[_Invitation] = deque()
        self._ending: set[asyncio.Future[None]] = set()
        self.by_invitation = False

    def __len__(self) -> int:
        """Sessions that are not complete."""
        return len(self._visits)

    def open(self) -> OnlineSession:
        """Raises ApiError 429 where there is no room, or nothing to do."""
        if len(self._visits) >= self._limits.max_sessions:  # ended ones that wait for a reward are counted too
            raise _busy(f"at most {self._limits.max_sessions} sessions may be open (proxy.limits.max_sessions)")
        while self._invitations:
            invitation = self._invitations.popleft()
            if not invitation.visit.done():  # whoever expected it may have left
                visit = self._visit(invitation.open, invitation.task)
                invitation.visit.set_result(visit)
                return visit
        if self.by_invitation:
            raise _busy("no task is waiting for an agent now")
        return self._visit(self._open, None)

    async def expect(self, open_session: OpenSession, task: Any) -> OnlineSession:
        """Hand a session to the next agent that asks for one, and wait until it is complete.

        Raises EpisodeTimeout or RewardTimeout. Cancelling it ends the session.
        """
        invitation = _Invitation(open_session, task, asyncio.get_running_loop().create_future())
        self._invitations.append(invitation)
        visit = await invitation.visit
        try:
            await visit.outcome
        finally:
            await self._leave(visit)
        return visit

    def find(self, visit_id: str) -> OnlineSession:
        """Raises ApiError 404 or 409."""
        visit = self._visits.get(visit_id)
        if visit is not None:
            return visit
        if visit_id in self._gone:
            raise ApiError(409, "this session is complete, or its deadline has passed", code="session_complete")
        raise ApiError(404, "there is no such session", code="session_not_found")

    def owned(self, visit_id: str, keys: list[str]) -> OnlineSession | None:
        """The visit, where one of the keys is its session's."""
        visit = self._visits.get(visit_id)
        if visit is None:
            return None
        key = visit.session.api_key.encode()
        return visit if any(hmac.compare_digest(sent.encode(), key) for sent in keys) else None

    def reward(self, visit: OnlineSession, reward: Any) -> None:
        """A number goes to the answer that finished last, a dict maps answers' ids to rewards, None rejects."""
        if reward is None:
            visit.rejected = True
        else:
            try:
                assign_reward(visit.session.tree, reward, "the agent")
            except RewardInvalid as error:
                raise bad_request(str(error), "reward") from None
            except NoInteractions as error:
                raise ApiError(409, str(error), param="reward", code="no_interactions") from None
        visit.rewarded = True
        self._complete(visit)

    async def end(self, visit: OnlineSession) -> None:
        """Once its calls are aborted. A reward may still come."""
        if visit.session.ended:
            return
        seconds = self._limits.reward_timeout_seconds
        self._arm(visit, seconds, RewardTimeout(f"no reward came within {seconds:g} s after the session's end"))
        await self._end(visit.session)
        self._complete(visit)

    async def aclose(self) -> None:
        for visit in list(self._visits.values()):
            await self._leave(visit)
        await asyncio.gather(*self._ending)

    def _visit(self, open_session: OpenSession, task: Any) -> OnlineSession:
        visit = OnlineSession(f"sess-{secrets.token_hex(12)}", open_session(), task)
        self._visits[visit.id] = visit
        seconds = self._limits.session_timeout_seconds
        self._arm(visit, seconds, EpisodeTimeout(f"the session was not ended within {seconds:g} s"))
        return visit

    def _arm(self, visit: OnlineSession, seconds: float, failure: Exception) -> None:
        if visit.timer is not None:
            visit.timer.cancel()
        visit.timer = asyncio.get_running_loop().call_later(seconds, self._expire, visit, failure)

    def _expire(self, visit: OnlineSession, failure: Exception) -> None:
        if not visit.outcome.done():
            visit.outcome.set_exception(failure)
            visit.outcome.exception()  # nobody need be there to hear it
        ending = asyncio.ensure_future(self._leave(visit))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _complete(self, visit: OnlineSession) -> None:
        if visit.session.ended and visit.rewarded and not visit.outcome.done():
            visit.outcome.set_result(not visit.rejected)
            self._forget(visit)

    async def _leave(self, visit: OnlineSession) -> None:
        self._forget(visit)
        visit.outcome.cancel()
        await self._end(visit.session)

    def _forget(self, visit: OnlineSession) -> None:
        if visit.timer is not None:
            visit.timer.cancel()
        if self._visits.pop(visit.id, None) is not None:
            self._gone[visit.id] = None
        while len(self._gone) > self._limits.remembered_ended_sessions:
            self._gone.popitem(last=False)


def _busy(message: str) -> ApiError:
    return ApiError(429, f"{message}; ask again later", kind="rate_limit_error", code="no_session_available")


Endpoint = Callable[[Request], Awaitable[Response]]


class AdminRoutes:
    def __init__(
        self, desk: OnlineSessions, sessions: Sessions, limits: ProxyLimits, key: str, self_reward: bool
    ) -> None:
        self._desk = desk
        self._sessions = sessions
        self._limits = limits
        self._key = key
        self._self_reward = self_reward

    def endpoints(self) -> list[tuple[str, str, Endpoint]]:
        return [
            ("POST", "/sessions", self._open),
            ("POST", "/sessions/{visit}/reward", self._reward),
            ("POST", "/sessions/{visit}/end", self._end),
            ("DELETE", "/sessions/{visit}", self._end),
        ]

    async def _open(self, request: Request) -> Response:
        self._require_admin(keys_of(request))
        raw = await read_body(request, self._limits)
        if raw and (body := parse_object(raw)):
            raise bad_request(f"a session takes no settings, got {', '.join(sorted(body))!r:.200}; send an empty body")
        try:
            visit = self._desk.open()
        except SessionLimitReached as error:
            raise ApiError(429, str(error), kind="rate_limit_error", code="no_session_available") from None
        session = visit.session
        # The caller's own way here, which is not the address that was bound where that is 0.0.0.0.
        base_url = f"{request.base_url}s/{session.token}/v1"
        answer = {"session_id": visit.id, "base_url": base_url, "api_key": session.api_key, "task": visit.task}
        return _json(answer, 201)

    async def _reward(self, request: Request) -> Response:
        visit = self._managed(request)
        body = parse_object(await read_body(request, self._limits))
        if set(body) != {"reward"}:
            raise bad_request(f'the body must be {{"reward": …}} and nothing else, got {sorted(body)!r:.200}', "reward")
        self._desk.reward(self._desk.find(visit.id), body["reward"])
        return _state(visit)

    async def _end(self, request: Request) -> Response:
        visit = self._managed(request)
        await read_body(request, self._limits)
        await self._desk.end(visit)
        return _state(visit)

    def _managed(self, request: Request) -> OnlineSession:
        """Who may not manage it does not learn whether it is there."""
        keys = keys_of(request)
        visit_id = request.path_params["visit"]
        if self._self_reward and (own := self._desk.owned(visit_id, keys)) is not None:
            return own
        self._require_admin(keys)
        return self._desk.find(visit_id)

    def _require_admin(self, keys: list[str]) -> None:
        if any(hmac.compare_digest(key.encode(), self._key.encode()) for key in keys):
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


def _state(visit: OnlineSession) -> Response:
    answers = [completion.id for completion in visit.session.tree.completions if not completion.lost]
    state = {
        "session_id": visit.id,
        "ended": visit.session.ended,
        "rewarded": visit.rewarded,
        "completions": answers,
    }
    return _json(state, 200)


def _json(value: object, status: int) -> Response:
    return Response(orjson.dumps(value, default=str), status, media_type="application/json")
