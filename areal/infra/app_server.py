"""An ASGI app over TCP: uvicorn on one socket, inside an event loop that belongs to the caller.

A connection has limited time and bytes for the head of each request, so that clients that send slowly cannot hold
connections open. Bodies are the app's own to limit.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from areal.config.errors import ConfigError

HEAD_BYTES = 64 * 2**10
START_SECONDS = 10.0
STOP_SECONDS = 5.0


class AppServer:
    def __init__(self, app: ASGIApp, listening: socket.socket, *, head_seconds: float, name: str) -> None:
        """`listening` as `listen` makes it; `head_seconds` = time for the head of a request; `name` is for errors."""
        self._socket = listening
        self._name = name
        self.origin = _origin(listening)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=_limited_protocol(head_seconds),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,  # no app here asks who its client is
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
            raise RuntimeError(f"{self._name} did not start to serve within {START_SECONDS:g} s on {self.origin}")

    async def stop(self) -> None:
        self._uvicorn.ending.set()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=STOP_SECONDS)
            self._task.cancel()
        self._socket.close()


def listen(host: str, port: int, name: str) -> socket.socket:
    """A socket that listens there; port 0 = a free one. Raises ConfigError, in which `name` is what cannot listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{name} cannot listen on {host}: {error}; use an address of this machine") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{name} cannot listen on {host}:{port}: {error}; use port 0 for a free one") from error
    listening.setblocking(False)
    return listening


def _origin(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    base: Any = H11Protocol  # httptools is faster, and takes heads that two readers may understand differently

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
