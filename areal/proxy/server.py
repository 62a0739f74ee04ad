"""The proxy over TCP: uvicorn on one socket, inside an event loop that belongs to the caller.

A connection has limited time and bytes for the head of each request, so that clients that send slowly cannot hold
connections open. The body has its own deadline and size, where it is read (requests.py).

On loopback only requests for this machine are served: a web page can give a name of its own this machine's address (DNS
rebinding), but the `Host` that its browser sends is still that name. Ports are not compared, so tunnels work.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from areal.config.errors import ConfigError
from areal.proxy.delivery import error_response
from areal.proxy.dialects import chat
from areal.proxy.errors import ApiError
from areal.utils.net import is_loopback
from areal.utils.shorten import shown

HEAD_BYTES = 64 * 2**10
START_SECONDS = 10.0
STOP_SECONDS = 5.0
MISDIRECTED_REQUEST = 421


class ProxyServer:
    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        head_seconds: float,
        exposed: bool = False,
        public_url: str = "",
    ) -> None:
        """`head_seconds` = time for the head of a request; `exposed` = it may listen beyond this machine; `public_url`
        names another host that requests may be for."""
        if not exposed and not is_loopback(host):
            raise ConfigError(f"the proxy listens on loopback addresses only, got {host!r}; use 127.0.0.1")
        self._socket = _bind(host, port)
        self.origin = _origin(self._socket)
        if is_loopback(self._socket.getsockname()[0]):
            app = _ForThisMachine(app, urlsplit(public_url).hostname)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=_limited_protocol(head_seconds),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                date_header=False,
                # Longer than any client keeps one, so that it is never closed under a request.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        up = asyncio.create_task(self._uvicorn.up.wait())
        await asyncio.wait((up, self._task), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            self._task.result()
        if not self._uvicorn.up.is_set():
            raise RuntimeError(f"the proxy's server did not start within {START_SECONDS:g} s on {self.origin}")

    async def stop(self) -> None:
        self._uvicorn.ending.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=STOP_SECONDS)
            self._task.cancel()
        self._socket.close()


class _ForThisMachine:
    """The app, for requests whose `Host` is a loopback address, localhost or `public_name`. HTTP/1.0 has no `Host`."""

    def __init__(self, app: ASGIApp, public_name: str | None) -> None:
        self._app = app
        self._public_name = public_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        foreign = next((host for host in hosts if not self._is_own(_name_of(host))), None)
        if foreign is None:
            await self._app(scope, receive, send)
            return
        message = (
            f"the Host of a request must be 127.0.0.1, localhost or [::1], got {shown(foreign)}; use the URL that the "
            "proxy printed, or set proxy.public_url to the one that clients use"
        )
        refusal = ApiError(MISDIRECTED_REQUEST, message, kind="permission_error", code="foreign_host")
        await error_response(chat, refusal)(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name == self._public_name


def _name_of(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip().lower()


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to its process, and waits for events instead of polling flags."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        await self.ending.wait()


def _limited_protocol(head_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with a deadline and a size for the head of each request."""
    base: Any = AutoHTTPProtocol

    class LimitedProtocol(base):
        def connection_made(self, transport: asyncio.Transport) -> None:
            self._head_bytes = 0
            self._deadline: asyncio.TimerHandle | None = None
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end_head()
                return
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.abort()
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            if self._deadline is None:
                self._deadline = asyncio.get_running_loop().call_later(head_seconds, self.transport.abort)

        def _end_head(self) -> None:
            self._head_bytes = 0
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"the proxy cannot listen on {host}: {error}; use an address of this machine") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConfigError(f"the proxy cannot listen on {host}:{port}: {error}; use port 0 for a free one") from error
    listening.setblocking(False)
    return listening


def _origin(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
