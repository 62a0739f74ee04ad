"""The HTTP app: routes, who may pass, and the way from bytes to a reply. Both doors run it.

Every route is there with and without `/v1`, and with and without a session's `/s/TOKEN`; `/v1` may even come twice,
because some SDKs add it to a base URL that has it. All routes but health need a session;
those that manage sessions need the admin key.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from areal.api.engine_api import InferenceEngine
from areal.api.errors import EngineError
from areal.proxy.delivery import Attendance, EventStream, WholeAnswer
from areal.proxy.dialects import Dialect, anthropic, chat, responses
from areal.proxy.dialects.base import ParameterRules
from areal.proxy.errors import ApiError, ClientGone, bad_request, engine_failed
from areal.proxy.generation import Generation
from areal.proxy.online import AdminRoutes
from areal.proxy.requests import keys_of, parse_object, read_body
from areal.proxy.retries import SharedAnswer, mark_of
from areal.proxy.sessions import ProxyLimits, Session, Sessions
from areal.utils import logging

Endpoint = Callable[[Request], Awaitable[Response]]

HEALTH_SECONDS = 5.0
PREFIXES = ("/s/{token}/v1", "/v1", "/s/{token}", "", "/s/{token}/v1/v1", "/v1/v1")


class App:
    def __init__(
        self,
        sessions: Sessions,
        generation: Generation,
        admin: AdminRoutes,
        limits: ProxyLimits,
        drop_params: bool = False,
    ) -> None:
        self._sessions = sessions
        self._generation = generation
        self._admin = admin
        self._limits = limits
        sight = generation.renderer.sight
        self._terms = ParameterRules(limits.max_choices, drop_params, None if sight is None else sight.album)
        self._log = logging.getLogger("proxy")

    def asgi(self) -> Starlette:
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/chat/completions", self._speaking(chat)),
            ("POST", "/responses", self._speaking(responses)),
            ("POST", "/messages", self._speaking(anthropic)),
            ("GET", "/models", self._guarded(self._models, chat)),
            ("GET", "/health", self._guarded(self._health, chat)),
        ]
        routes = [
            Route(prefix + path, endpoint, methods=[method])
            for method, path, endpoint in endpoints
            for prefix in PREFIXES
        ]
        routes += [
            Route(prefix + path, self._guarded(endpoint, chat), methods=[method])
            for method, path, endpoint in self._admin.endpoints()
            for prefix in ("", "/v1")
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})
        app.router.redirect_slashes = False
        return app

    def _speaking(self, dialect: Dialect) -> Endpoint:
        return self._guarded(partial(self._converse, dialect), dialect)

    def _guarded(self, endpoint: Endpoint, dialect: Dialect) -> Endpoint:
        """Failures as answers, in the dialect's words."""

        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)
            except Exception as error:
                return _failure(dialect, self._explain(error))

        return answer

    def _explain(self, error: Exception) -> ApiError:
        """Only what nobody foresaw is a 500."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RecursionError):  # JSON within a text, which nobody measured before it was read
            return bad_request("the request is nested too deeply")
        self._log.error("a request to the proxy failed", exc_info=error)
        return ApiError(500, "the proxy failed; its log says why", kind="server_error")

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        allowed = "; use POST chat/completions, responses or messages, GET models or health"
        message = f"{request.method} is not allowed here" if status == 405 else "there is no such route"
        return _failure(chat, ApiError(status, message + allowed))

    async def _converse(self, dialect: Dialect, request: Request) -> Response:
        session = self._identify(request)
        raw = await read_body(request, self._limits)
        call = dialect.parse(parse_object(raw), self._terms)
        mark = mark_of(call.id_prefix, raw, request.headers)
        attendance = Attendance(session, request.receive, self._limits.max_calls_per_session)
        try:
            attendance.check()
        except ApiError:
            session.retries.refuse(mark)
            raise
        claim = partial(session.retries.claim, mark, lambda: SharedAnswer(self._generation.events(session, call)))
        common = (claim, attendance, self._explain, partial(_failure, dialect))
        return (
            EventStream(dialect.writer(call), *common)
            if call.stream
            else WholeAnswer(partial(dialect.render, call), *common)
        )

    async def _models(self, request: Request) -> Response:
        self._identify(request)
        model = {"id": self._generation.model_name, "object": "model", "created": 0, "owned_by": "areal"}
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        engine: InferenceEngine = self._generation.engine
        try:
            health = await asyncio.wait_for(engine.health(), HEALTH_SECONDS)
        except (EngineError, TimeoutError) as error:
            raise engine_failed(f"the inference engine is not healthy: {error}") from error
        return _json({"status": "ok", "version": health.version})

    def _identify(self, request: Request) -> Session:
        return self._sessions.identify(request.path_params.get("token"), keys_of(request))


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _failure(dialect: Dialect, failure: ApiError) -> Response:
    return Response(
        orjson.dumps(dialect.error(failure)), failure.status, headers=failure.headers, media_type="application/json"
    )
