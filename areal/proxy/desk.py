"""Sessions for agents outside this process: opened, rewarded and ended by somebody who speaks HTTP.

A session is complete when it has ended and has its reward, in either order: the reward may come later, up to a
deadline. Where the desk is by invitation, sessions are handed out only as `expect` asks for them, each with its task.
"""

import asyncio
import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from areal.api.errors import EpisodeTimeout, NoInteractions, RewardInvalid, RewardTimeout
from areal.proxy.errors import ApiError, bad_request
from areal.proxy.limits import ProxyLimits
from areal.proxy.sessions import Session
from areal.trajectory import assign_reward

OpenSession = Callable[[], Session]


@dataclass(eq=False)
class Visit:
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
    visit: asyncio.Future[Visit]


class Desk:
    def __init__(
        self, open_session: OpenSession, end_session: Callable[[Session], Awaitable[None]], limits: ProxyLimits
    ) -> None:
        self._open = open_session
        self._end = end_session
        self._limits = limits
        self._visits: dict[str, Visit] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._invitations: deque[_Invitation] = deque()
        self._ending: set[asyncio.Future[None]] = set()
        self.by_invitation = False

    def __len__(self) -> int:
        """Sessions that are not complete."""
        return len(self._visits)

    def open(self) -> Visit:
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

    async def expect(self, open_session: OpenSession, task: Any) -> Visit:
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

    def find(self, visit_id: str) -> Visit:
        """Raises ApiError 404 or 409."""
        visit = self._visits.get(visit_id)
        if visit is not None:
            return visit
        if visit_id in self._gone:
            raise ApiError(409, "this session is complete, or its deadline has passed", code="session_complete")
        raise ApiError(404, "there is no such session", code="session_not_found")

    def owned(self, visit_id: str, keys: list[str]) -> Visit | None:
        """The visit, where one of the keys is its session's."""
        visit = self._visits.get(visit_id)
        if visit is None:
            return None
        key = visit.session.api_key.encode()
        return visit if any(hmac.compare_digest(sent.encode(), key) for sent in keys) else None

    def reward(self, visit: Visit, reward: Any) -> None:
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

    async def end(self, visit: Visit) -> None:
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

    def _visit(self, open_session: OpenSession, task: Any) -> Visit:
        visit = Visit(f"sess-{secrets.token_hex(12)}", open_session(), task)
        self._visits[visit.id] = visit
        seconds = self._limits.session_timeout_seconds
        self._arm(visit, seconds, EpisodeTimeout(f"the session was not ended within {seconds:g} s"))
        return visit

    def _arm(self, visit: Visit, seconds: float, failure: Exception) -> None:
        if visit.timer is not None:
            visit.timer.cancel()
        visit.timer = asyncio.get_running_loop().call_later(seconds, self._expire, visit, failure)

    def _expire(self, visit: Visit, failure: Exception) -> None:
        if not visit.outcome.done():
            visit.outcome.set_exception(failure)
            visit.outcome.exception()  # nobody need be there to hear it
        ending = asyncio.ensure_future(self._leave(visit))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _complete(self, visit: Visit) -> None:
        if visit.session.ended and visit.rewarded and not visit.outcome.done():
            visit.outcome.set_result(not visit.rejected)
            self._forget(visit)

    async def _leave(self, visit: Visit) -> None:
        self._forget(visit)
        visit.outcome.cancel()
        await self._end(visit.session)

    def _forget(self, visit: Visit) -> None:
        if visit.timer is not None:
            visit.timer.cancel()
        if self._visits.pop(visit.id, None) is not None:
            self._gone[visit.id] = None
        while len(self._gone) > self._limits.remembered_ended_sessions:
            self._gone.popitem(last=False)


def _busy(message: str) -> ApiError:
    return ApiError(429, f"{message}; ask again later", kind="rate_limit_error", code="no_session_available")
