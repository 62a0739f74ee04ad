"""The HTTP app: its routes, whose key each needs, and the way from a request to its answer.

The same app answers over TCP and in process. Every route exists with and without `/v1`, and with and without a
session's `/s/TOKEN`; `/v1` may even come twice, because some SDKs add it to a base URL that has it. All routes but
health need a session's key; those that manage sessions (online.py) need the admin key.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal.api.errors import EngineError
from areal.config.rollout import ProxyLimits
from areal.proxy.delivery import Delivery, WholeAnswer, error_response, whole_error
from areal.proxy.dialects import DIALECTS, anthropic, dialect_of_request, responses
from areal.proxy.dialects.base import Dialect, ParameterRules
from areal.proxy.errors import ApiError, as_api_error, engine_failed
from areal.proxy.generation import Generation
from areal.proxy.online import SessionRoutes
from areal.proxy.requests import Head, KnownBodies, parse_object, read_body, read_head, require_size
from areal.proxy.retries import Attempt
from areal.proxy.sessions import Session, Sessions
from areal.proxy.types import Call
from areal.utils.shorten import shown

Endpoint = Callable[[Request], Awaitable[ASGIApp]]

HEALTH_SECONDS = 5.0
LONG_BODY = 1 << 18
"""Bytes of a body that is parsed in a thread, because it takes tens of milliseconds."""
PREFIXES = ("/s/{token}/v1", "/v1", "/s/{token}", "", "/s/{token}/v1/v1", "/v1/v1")
CLIENT_CLOSED_REQUEST = 499
"""For a log only: no one receives it."""


class App:
    """Calls of a model take a short way, over TCP and in process; all other requests go through Starlette's routes."""

    def __init__(
        self,
        sessions: Sessions,
        generation: Generation,
        session_routes: SessionRoutes,
        limits: ProxyLimits,
        drop_params: bool = False,
        *,
        trained: bool = True,
        strict_model: bool = False,
    ) -> None:
        """`trained` = answers may be; `strict_model` = a call must name the model that is served, if it names one."""
        self._sessions = sessions
        self._generation = generation
        self._session_routes = session_routes
        self._limits = limits
        self._rules = ParameterRules(
            limits.max_choices,
            drop_params,
            generation.images,
            trained=trained,
            thinks=generation.thinks,
            thinking_switch=generation.thinking_switch,
        )
        self._strict_model = strict_model
        self._routes = self._starlette()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = _conversation_route(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await self._routes(scope, receive, send)
            return
        dialect, token = route
        answer: ASGIApp
        try:
            head = read_head(scope["headers"])
            session = self._sessions.identify(token, head.keys)
            raw = await read_body(receive, self._limits)
            answer = await self._delivery(dialect, session, head, raw)
        except ClientDisconnect:
            answer = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            answer = error_response(dialect, as_api_error(error))
        await answer(scope, receive, send)

    async def answer(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> WholeAnswer | ASGIApp:
        """The answer to a client in this process; the app that gives it if it comes in parts or calls no model."""
        route = _conversation_route(method, path)
        if route is None:
            return self._routes
        dialect, token = route
        try:
            head = read_head(headers)
            session = self._sessions.identify(token, head.keys)
            require_size(len(body), self._limits)
            delivery = await self._delivery(dialect, session, head, body)
        except Exception as error:
            return whole_error(dialect, as_api_error(error))
        return delivery if delivery.streams else await delivery.whole()

    def _starlette(self) -> Starlette:
        endpoints = [
            ("GET", "/models", _guarded(self._models)),
            ("GET", "/models/{model:path}", _guarded(self._model)),
            ("GET", "/health", _guarded(self._health)),
            ("POST", "/messages/count_tokens", _guarded(self._count_tokens)),
            ("GET", "/responses/{response}", _guarded(self._stored)),
            ("DELETE", "/responses/{response}", _guarded(self._delete_stored)),
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
        # Calls of a model do not come here: what does has another method, which is what the answer says.
        routes += [Route(prefix + path, _no_route, methods=["POST"]) for path in DIALECTS for prefix in PREFIXES]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        app.router.redirect_slashes = False
        return app

    async def _delivery(self, dialect: Dialect, session: Session, head: Head, raw: bytes) -> Delivery:
        if len(raw) <= LONG_BODY:
            call = self._parse(dialect, raw, session.bodies)
        else:
            call = await self._generation.prompts.in_background(self._parse, dialect, raw, session.bodies)
        if self._strict_model:
            self._require_model(call.model)
        attempt = Attempt.of(call.id_prefix, session.bodies.digest(raw), head)
        return Delivery(self._generation, dialect, session, call, attempt)

    def _parse(self, dialect: Dialect, raw: bytes, bodies: KnownBodies) -> Call:
        if not dialect.GROWING:
            call = dialect.parse(parse_object(raw), self._rules)
        else:
            body, past = bodies.parse(raw, dialect.GROWING)
            call = dialect.parse(body, self._rules, past)
            bodies.remember(raw, body[dialect.GROWING], past, call.messages)
        call.size = len(raw)
        return call

    async def _models(self, request: Request) -> Response:
        self._identify(request)
        if _dialect_of(request) is anthropic:
            name, model = self._generation.model_name, self._described(request)
            return _json({"data": [model], "has_more": False, "first_id": name, "last_id": name})
        return _json({"object": "list", "data": [self._described(request)]})

    async def _model(self, request: Request) -> Response:
        self._identify(request)
        self._require_model(request.path_params["model"])
        return _json(self._described(request))

    def _described(self, request: Request) -> dict[str, Any]:
        name = self._generation.model_name
        if _dialect_of(request) is anthropic:
            return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return {"id": name, "object": "model", "created": 0, "owned_by": "areal"}

    def _require_model(self, name: str) -> None:
        """Raises ApiError 404."""
        served = self._generation.model_name
        if name not in ("", served):
            message = f"the model {shown(name)} is not served here; use {shown(served)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _count_tokens(self, request: Request) -> Response:
        session = self._identify(request)
        raw = await read_body(request.receive, self._limits)
        call = anthropic.parse_counted(parse_object(raw), self._rules)
        call.size = len(raw)
        return _json({"input_tokens": await self._generation.count_tokens(session, call)})

    async def _stored(self, request: Request) -> Response:
        call, reply = self._identify(request).stored.get(request.path_params["response"])
        return _json(responses.render(call, reply))

    async def _delete_stored(self, request: Request) -> Response:
        name = request.path_params["response"]
        self._identify(request).stored.delete(name)
        return _json({"id": name, "object": "response", "deleted": True})

    async def _health(self, request: Request) -> Response:
        try:
            health = await asyncio.wait_for(self._generation.engine.health(), HEALTH_SECONDS)
        except (EngineError, TimeoutError) as error:
            raise engine_failed(f"the inference engine is not healthy: {error}") from error
        return _json({"status": "ok", "version": health.version})

    def _identify(self, request: Request) -> Session:
        return self._sessions.identify(request.path_params.get("token"), read_head(request.scope["headers"]).keys)


def _conversation_route(method: str, path: str) -> tuple[Dialect, str | None] | None:
    """The dialect of a request that calls a model, and the token in its path. None = it does something else."""
    token = None
    if path.startswith("/s/"):
        token, _, rest = path[3:].partition("/")
        path = "/" + rest
    dialect = DIALECTS.get(path.removeprefix("/v1").removeprefix("/v1"))
    return None if dialect is None or method != "POST" or token == "" else (dialect, token)


def _guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint with failures as answers."""

    async def answer(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return error_response(_dialect_of(request), as_api_error(error))

    return answer


def _dialect_of(request: Request) -> Dialect:
    return dialect_of_request(request.url.path, request.scope["headers"])


async def _no_route(request: Request, error: Exception | None = None) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} is not allowed here" if status == 405 else "there is no such route"
    routes = ", ".join(path.removeprefix("/") for path in DIALECTS)
    failure = ApiError(status, f"{message}; use POST {routes}, or GET models, health")
    return error_response(_dialect_of(request), failure)


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
