"""The HTTP app: its routes, whose key each needs, and the way from a request to its answer.

The same app answers over TCP and in process. Every route exists with and without `/v1`, and with and without a
session's `/s/TOKEN`; `/v1` may even come twice, because some SDKs add it to a base URL that has it. All routes but
health need a session's key; those that manage sessions (online.py) need the admin key.
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
from starlette.types import ASGIApp

from areal.api.errors import EngineError
from areal.config.rollout import ProxyLimits
from areal.proxy.delivery import Delivery, error_response
from areal.proxy.dialects import DIALECTS, chat
from areal.proxy.dialects.base import Dialect, ParameterRules
from areal.proxy.errors import ApiError, as_api_error, engine_failed
from areal.proxy.generation import Generation
from areal.proxy.online import SessionRoutes
from areal.proxy.requests import keys_of, parse_object, read_body
from areal.proxy.retries import Attempt
from areal.proxy.sessions import Session, Sessions
from areal.proxy.types import Call

Endpoint = Callable[[Request], Awaitable[ASGIApp]]

HEALTH_SECONDS = 5.0
LONG_BODY = 1 << 18
"""Bytes of a body that is parsed in a thread, because it takes tens of milliseconds."""
PREFIXES = ("/s/{token}/v1", "/v1", "/s/{token}", "", "/s/{token}/v1/v1", "/v1/v1")
CLIENT_CLOSED_REQUEST = 499
"""For a log only: no one receives it."""


class App:
    def __init__(
        self,
        sessions: Sessions,
        generation: Generation,
        session_routes: SessionRoutes,
        limits: ProxyLimits,
        drop_params: bool = False,
    ) -> None:
        self._sessions = sessions
        self._generation = generation
        self._session_routes = session_routes
        self._limits = limits
        self._rules = ParameterRules(limits.max_choices, drop_params, generation.images)

    def asgi(self) -> Starlette:
        endpoints = [
            *(
                ("POST", path, _guarded(partial(self._converse, dialect), dialect))
                for path, dialect in DIALECTS.items()
            ),
            ("GET", "/models", _guarded(self._models)),
            ("GET", "/health", _guarded(self._health)),
        ]
        routes = [
            Route(prefix + path, endpoint, methods=[method])
            for method, path, endpoint in endpoints
            for prefix in PREFIXES
        ]
        routes += [
            Route(prefix + path, _guarded(endpoint), methods=[method])
            for method, path, endpoint in self._session_routes.endpoints()
            for prefix in ("", "/v1")
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        app.router.redirect_slashes = False
        return app

    async def _converse(self, dialect: Dialect, request: Request) -> ASGIApp:
        session = self._identify(request)
        raw = await read_body(request, self._limits)
        if len(raw) <= LONG_BODY:
            call = self._parse(dialect, raw)
        else:
            call = await self._generation.in_background(self._parse, dialect, raw)
        attempt = Attempt.of(call.id_prefix, raw, request.headers)
        return Delivery(self._generation, dialect, session, call, attempt)

    def _parse(self, dialect: Dialect, raw: bytes) -> Call:
        call = dialect.parse(parse_object(raw), self._rules)
        call.size = len(raw)
        return call

    async def _models(self, request: Request) -> Response:
        self._identify(request)
        model = {"id": self._generation.model_name, "object": "model", "created": 0, "owned_by": "areal"}
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        try:
            health = await asyncio.wait_for(self._generation.engine.health(), HEALTH_SECONDS)
        except (EngineError, TimeoutError) as error:
            raise engine_failed(f"the inference engine is not healthy: {error}") from error
        return _json({"status": "ok", "version": health.version})

    def _identify(self, request: Request) -> Session:
        return self._sessions.identify(request.path_params.get("token"), keys_of(request))


def _guarded(endpoint: Endpoint, dialect: Dialect = chat) -> Endpoint:
    """The endpoint with failures as answers of that dialect."""

    async def answer(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return error_response(dialect, as_api_error(error))

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} is not allowed here" if status == 405 else "there is no such route"
    routes = ", ".join(path.removeprefix("/") for path in DIALECTS)
    return error_response(chat, ApiError(status, f"{message}; use POST {routes}, or GET models, health"))


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
