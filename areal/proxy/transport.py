"""HTTP clients whose calls to the proxy's own address never leave the process.

Every other address is reached over the network as usual. The same code serves httpx and httpx2, which are one interface
in two modules, because each SDK wants one of them.

An app that can (`DirectApp`) gives a whole answer in the client's own task. Otherwise the app runs as a task, and its
answer is taken chunk by chunk: it counts as sent once its end was taken, and a client that closes earlier cancels it.
"""

import asyncio
import datetime
import logging
import time
from collections.abc import AsyncIterator
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import orjson
from starlette.types import ASGIApp, Message, Scope

from areal.infra.http_clients import shareable_client

CALL_SECONDS = 600.0
CLOSE_SECONDS = 5.0
QUEUED_CHUNKS = 64
"""How far an answer may run ahead of its reader."""
MAX_URLS = 1024
"""Addresses that are parsed once; each session has its own."""
BODIES = ("content", "data", "files")
"""The ways to give a request a body that is not JSON."""


@runtime_checkable
class DirectApp(Protocol):
    """An ASGI app that need not be asked in ASGI's messages."""

    async def answer(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | ASGIApp:
        """Status, headers and body; or the app to ask in ASGI's messages, because the answer comes in parts.

        Cancelling it ends the call.
        """
        ...


def shared_client(module: ModuleType, app: ASGIApp, origins: list[str]) -> Any:
    """An `AsyncClient` of that module for all agents of a process, which runs the app for calls to `origins`."""
    transport = in_process_transport(module, app)
    return shareable_client(module, dict.fromkeys(origins, transport), _short_cut(module, transport, origins))


def _short_cut(module: ModuleType, transport: Any, origins: list[str]) -> Any:
    """A kind of `AsyncClient` that spares calls to `origins` what only the network needs."""
    http: Any = module
    default = http.USE_CLIENT_DEFAULT
    logger = logging.getLogger(module.__name__)
    parsed_url = lru_cache(MAX_URLS)(http.URL)
    addresses = {_address(http.URL(origin)) for origin in origins}
    beginnings = tuple(f"{origin}/" for origin in origins)

    class ShortCutClient(http.AsyncClient):
        def build_request(self, method: str, url: Any, *, json: Any = None, **options: Any) -> Any:
            """A session's URL is parsed once, and JSON is written by the faster of two libraries that agree."""
            if not isinstance(url, str) or not url.startswith(beginnings):
                return super().build_request(method, url, json=json, **options)
            written = None if json is None or any(map(options.get, BODIES)) else _written(json)
            if written is None:
                return super().build_request(method, parsed_url(url), json=json, **options)
            request = super().build_request(method, parsed_url(url), **{**options, "content": written})
            request.headers.setdefault("Content-Type", "application/json")
            return request

        async def send(self, request: Any, *, stream: bool = False, auth: Any = default, **options: Any) -> Any:
            """Without redirects, cookies and credentials, of which the app knows nothing."""
            inside = _address(request.url) in addresses
            if not inside or stream or self._wants_more(request, auth) or logger.isEnabledFor(logging.INFO):
                return await super().send(request, stream=stream, auth=auth, **options)
            began = time.perf_counter()
            try:
                response = await transport.handle_async_request(request)
            except http.RequestError as error:
                error.request = request
                raise
            response.request = request
            await response.aread()
            response.elapsed = datetime.timedelta(seconds=time.perf_counter() - began)
            return response

        def _wants_more(self, request: Any, auth: Any) -> bool:
            """Whether users have changed the client or the request, or closed it: then it does all that httpx does."""
            credentials = request.url.userinfo or self.auth or not (auth is None or auth is default)
            hooks = any(self.event_hooks.values())
            return bool(credentials or hooks or self.is_closed or "timeout" not in request.extensions)

    return ShortCutClient


def _address(url: Any) -> tuple[str, bytes]:
    return url.scheme, url.netloc


def _written(value: Any) -> bytes | None:
    """As JSON; None = the standard library must write it, or say why it cannot be written."""
    try:
        written = orjson.dumps(value, option=_NOTHING_ELSE)
    except TypeError:
        return None
    return None if b"null" in written else written  # NaN is written so too, and must be refused


_NOTHING_ELSE = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def in_process_transport(module: ModuleType, app: ASGIApp) -> Any:
    """A transport of that module which runs the app."""
    http: Any = module
    direct = app if isinstance(app, DirectApp) else None

    class Chunks(http.AsyncByteStream):
        def __init__(self, call: "AppCall", first: bytes, timeout_seconds: float | None) -> None:
            self._call = call
            self._first = first
            self._timeout_seconds = timeout_seconds

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield self._first
            more = True
            while more:
                chunk, more = await _timed(self._call.chunk(self._timeout_seconds))
                if chunk:
                    yield chunk

        async def aclose(self) -> None:
            await self._call.aclose()

    class InProcessTransport(http.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            body = await request.aread()
            timeout = request.extensions.get("timeout", {}).get("read")
            scope = scope_of(request.method, request.url, request.headers.raw)
            asked = app
            if direct is not None:
                answer = await _timed(_answer(direct, scope, body, timeout))
                if isinstance(answer, tuple):
                    status, headers, content = answer
                    return http.Response(status, headers=headers, content=content)
                asked = answer
            call = AppCall(asked, scope, body)
            try:
                status, headers = await _timed(call.start(timeout))
                first, more = await _timed(call.chunk(timeout))
                if not more:
                    # The app must know that its answer arrived before the client, who may end the session, goes on.
                    await call.aclose()
            except BaseException:
                await call.aclose()
                raise
            stream = Chunks(call, first, timeout) if more else http.ByteStream(first)
            return http.Response(status, headers=headers, stream=stream)

    async def _timed(step: Any) -> Any:
        try:
            return await step
        except TimeoutError as error:
            raise http.ReadTimeout("the proxy gave no answer in time") from error
        except ConnectionError as error:
            raise http.RemoteProtocolError(str(error)) from error

    return InProcessTransport()


async def _answer(app: DirectApp, scope: Scope, body: bytes, timeout_seconds: float | None) -> Any:
    async with asyncio.timeout(timeout_seconds):
        return await app.answer(scope["method"], scope["path"], scope["headers"], body)


class AppCall:
    """One request to the app without a network. Knows nothing of any HTTP library."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        self._body: bytes | None = body
        self._closed = asyncio.Event()
        self._taken = asyncio.Event()
        """Set once the whole answer was taken."""
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_CHUNKS)
        self._task = asyncio.ensure_future(self._run(app, scope))

    async def start(self, timeout_seconds: float | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers. Raises TimeoutError."""
        message = await self._next(timeout_seconds)
        if message is None:
            raise ConnectionError("the app ended without an answer")
        return message["status"], list(message.get("headers", ()))

    async def chunk(self, timeout_seconds: float | None) -> tuple[bytes, bool]:
        """The next part of the body, and whether more follows. Raises TimeoutError."""
        message = await self._next(timeout_seconds)
        if message is None:
            raise ConnectionError("the app ended in the middle of its answer")
        more = message.get("more_body", False)
        if not more:
            self._taken.set()
        return message.get("body", b""), more

    async def aclose(self) -> None:
        """Disconnect from the app, unless its answer was taken, and wait until it has ended."""
        if not self._taken.is_set():
            self._closed.set()
            self._task.cancel()
        if not self._task.done():
            await asyncio.wait((self._task,), timeout=CLOSE_SECONDS)

    async def _next(self, timeout_seconds: float | None) -> Message | None:
        if not self._messages.empty() or self._task.done():
            return None if self._messages.empty() else self._messages.get_nowait()
        async with asyncio.timeout(timeout_seconds):
            return await self._messages.get()

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            # Wakes a reader that waits; one that finds messages sees after them that the task has ended.
            if not self._messages.full():
                self._messages.put_nowait(None)

    async def _send(self, message: Message) -> None:
        await self._messages.put(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._taken.wait()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}


def scope_of(method: str, url: Any, headers: list[tuple[bytes, bytes]]) -> Scope:
    """A request as ASGI describes it; `url` is an httpx URL."""
    path, _, query = url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in headers],
        "client": ("127.0.0.1", 0),
        "server": (url.host, url.port),
    }
