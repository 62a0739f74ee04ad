"""The routes that manage sessions, for agents outside this process. They need the admin key, which calls no model.

    POST   /sessions               -> {"session_id", "base_url", "api_key", "task"}
    POST   /sessions/ID/reward     {"reward": number | {completion id: number} | null}
    POST   /sessions/ID/end        or DELETE /sessions/ID

A session's own key manages nothing, unless `self_reward` lets it reward and end its own session.
"""

import hmac
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from areal.proxy.credentials import keys_of
from areal.proxy.desk import Desk, Visit
from areal.proxy.errors import ApiError, bad_request, unauthorized
from areal.proxy.limits import ProxyLimits, SessionLimitReached
from areal.proxy.reading import parse_object, read_body
from areal.proxy.sessions import Sessions

Endpoint = Callable[[Request], Awaitable[Response]]


class Admin:
    def __init__(self, desk: Desk, sessions: Sessions, limits: ProxyLimits, key: str, self_reward: bool) -> None:
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

    def _managed(self, request: Request) -> Visit:
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


def _state(visit: Visit) -> Response:
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
