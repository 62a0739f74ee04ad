"""The TCP door: uvicorn on one socket, inside a loop that belongs to somebody else."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from areal.config.errors import ConfigError
from areal.proxy.patience import patient_protocol
from areal.utils.loopback import is_loopback

START_SECONDS = 10.0
STOP_SECONDS = 5.0


class Server:
    def __init__(self, app: ASGIApp, host: str, port: int, *, head_seconds: float, exposed: bool = False) -> None:
        """`head_seconds` = time a client has to say what it wants; `exposed` = it may listen beyond this machine."""
        if not exposed and not is_loopback(host):
            raise ConfigError(f"the proxy listens on loopback addresses only, got {host!r}; use 127.0.0.1")
        self._socket = _bind(host, port)
        self.origin = _origin(self._socket)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=patient_protocol(head_seconds),
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


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to the process that hosts it, says when it is up, and ends when told, not polled."""

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
