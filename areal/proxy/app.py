"""The HTTP app: routes, who may pass, and the way from bytes to a reply. Both doors run it.

Every route is there with and without `/v1`, and with and without a session's `/s/TOKEN`. All but health need a session.
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
from starlette.types import Receive

from areal.api.engine_api import InferenceEngine
from areal.api.errors import EngineError
from areal.proxy.dialects import chat
from areal.proxy.errors import ApiError, ClientGone, bad_request, engine_failed, session_ended
from areal.proxy.exchange import Call, Reply
from areal.proxy.generation import Generation
from areal.proxy.limits import ProxyLimits
from areal.proxy.sessions import Session, Sessions, too_many_calls
from areal.utils import logging

Endpoint = Callable[[Request], Awaitable[Response]]

HEALTH_SECONDS = 5.0
PREFIXES = ("/s/{token}/v1", "/v1", "/s/{token}", "")


class App:
    def __init__(self, sessions: Sessions, generation: Generation, limits: ProxyLimits) -> None:
        self._sessions = sessions
        self._generation = generation
        self._limits = limits
        self._log = logging.getLogger("proxy")

    def asgi(self) -> Starlette:
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/chat/completions", self._chat_completions),
            ("GET", "/models", self._models),
            ("GET", "/health", self._health),
        ]
        routes = [
            Route(prefix + path, self._guarded(endpoint), methods=[method])
            for method, path, endpoint in endpoints
            for prefix in PREFIXES
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})
        app.router.redirect_slashes = False
        return app

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Failures as answers; only what nobody foresaw is a 500."""

        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ApiError as failure:
                return _failure(failure)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)
            except Exception:
                self._log.exception("a request to %s failed", request.url.path.partition("/v1")[2] or "the proxy")
                return _failure(ApiError(500, "the proxy failed; its log says why", kind="server_error"))

        return answer

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        allowed = "; use POST chat/completions, GET models or GET health"
        message = f"{request.method} is not allowed here" if status == 405 else "there is no such route"
        return _failure(ApiError(status, message + allowed))

    async def _chat_completions(self, request: Request) -> Response:
        session = self._identify(request)
        body = await self._json(request)
        call = chat.parse(body, self._limits.max_choices)
        reply = await self._answer(session, call, request.receive)
        return _json(chat.render(reply))

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
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = [bearer.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        return self._sessions.identify(request.path_params.get("token"), [key for key in keys if key])

    async def _json(self, request: Request) -> dict[str, Any]:
        raw = await self._body(request)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"the body must be JSON: {error}") from None
        if not isinstance(body, dict):
            raise bad_request(f"the body must be a JSON object, got {type(body).__name__}")
        return body

    async def _body(self, request: Request) -> bytes:
        limit = self._limits.max_body_bytes
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_seconds):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise ApiError(413, f"a body may have {limit} bytes (ProxyLimits.max_body_bytes)")
        except TimeoutError:
            raise ApiError(408, f"the body must arrive within {self._limits.body_timeout_seconds:g} s") from None
        return b"".join(chunks)

    async def _answer(self, session: Session, call: Call, receive: Receive) -> Reply:
        """Generate while the client listens; it going away, or its session ending, cancels this task."""
        if session.ended:  # while the body was on its way
            raise session_ended()
        if len(session.calls) >= self._limits.max_calls_per_session:
            raise too_many_calls(self._limits.max_calls_per_session)
        task = asyncio.current_task()
        assert task is not None
        listener = asyncio.ensure_future(_cancel_when_gone(task, receive))
        session.calls.add(task)
        try:
            return await self._generation.answer(session, call)
        except asyncio.CancelledError:
            if not (session.ended or listener.done()):
                raise
            task.uncancel()  # it was ours, and ends here
            raise (session_ended() if session.ended else ClientGone()) from None
        finally:
            session.calls.discard(task)
            listener.cancel()


async def _cancel_when_gone(task: asyncio.Task[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _failure(failure: ApiError) -> Response:
    return Response(
        orjson.dumps(chat.error(failure)), failure.status, headers=failure.headers, media_type="application/json"
    )
