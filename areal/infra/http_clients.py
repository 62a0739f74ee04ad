"""HTTP clients that all code on an event loop shares: one of each kind per loop, and the one class of httpx clients.

Making a client loads certificates, some 30 ms; sharing one also shares its open connections. Clients are made on first
use and closed with the loop: an asynchronous generator holds them, which `asyncio.run` (and whatever else calls
`loop.shutdown_asyncgens`) finishes. Closing one, or leaving its `async with`, does nothing: others share it.

The table of loops is module state because it must be: a client belongs to a loop, a loop has no place to keep one, and
user code that asks for a client has nothing else in hand.
"""

import asyncio
import os
import urllib.request
import weakref
from collections.abc import AsyncGenerator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from areal.utils.net import LOOPBACK_HOSTS, bypass_proxies

if TYPE_CHECKING:
    import aiohttp
    import httpx

CONNECT_SECONDS = 30.0
READ_SECONDS = 600.0
"""A call may wait for a model this long between two bytes."""
KEEPALIVE_SECONDS = 60.0


class SharedClients:
    """The clients of one event loop."""

    def __init__(self) -> None:
        self._aiohttp: aiohttp.ClientSession | None = None
        self._httpx: Any = None

    def aiohttp_session(self) -> "aiohttp.ClientSession":
        if self._aiohttp is None:
            self._aiohttp = _new_aiohttp_session()
        return self._aiohttp

    def httpx_client(self) -> "httpx.AsyncClient":
        if self._httpx is None:
            import httpx

            self._httpx = shareable_client(httpx)
        client: httpx.AsyncClient = self._httpx
        return client

    async def aclose(self) -> None:
        session, self._aiohttp = self._aiohttp, None
        client, self._httpx = self._httpx, None
        if session is not None:
            await type(session).close(session)
        if client is not None:
            await client.end()


_Held = tuple[SharedClients, AsyncGenerator[SharedClients, None]]
_clients_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Held] = weakref.WeakKeyDictionary()


async def shared_clients() -> SharedClients:
    """The clients of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clients_by_loop:
        for dead in [other for other in _clients_by_loop if other.is_closed()]:
            del _clients_by_loop[dead]  # closed without shutdown_asyncgens; its clients refer to it and would keep it
        clients = SharedClients()
        holder = _hold(loop, clients)
        _clients_by_loop[loop] = clients, holder
        await anext(holder)
    return _clients_by_loop[loop][0]


async def close_clients() -> None:
    """Close the clients of the running loop now, for a loop that goes on."""
    held = _clients_by_loop.get(asyncio.get_running_loop())
    if held is not None:
        await held[1].aclose()


async def _hold(loop: asyncio.AbstractEventLoop, clients: SharedClients) -> AsyncGenerator[SharedClients, None]:
    try:
        yield clients
    finally:
        _clients_by_loop.pop(loop, None)
        await clients.aclose()


def shareable_client(module: ModuleType, mounts: Mapping[str, Any] | None = None, base: Any = None) -> Any:
    """An `AsyncClient` of `module` (httpx or httpx2) that its users cannot close; `end()` does.

    Agents wrap a client in an SDK's `async with`, which must leave it open for the others. `mounts` are transports by
    address; a loopback address without one is reached directly, whatever HTTP_PROXY says. `base` is a kind of
    `AsyncClient` of the module to make one of; None = that itself.
    """
    http: Any = module
    client: Any = base or http.AsyncClient

    class SharedClient(client):
        async def aclose(self) -> None:
            """Leave it open: others share it."""

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            """Leave it open: others share it."""

        async def end(self) -> None:
            await super().aclose()

    direct = {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in LOOPBACK_HOSTS}
    return SharedClient(
        limits=http.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
        timeout=http.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
        mounts={**direct, **(mounts or {})},
    )


def _new_aiohttp_session() -> "aiohttp.ClientSession":
    import aiohttp

    # aiohttp looks for a proxy in the environment at each request, in a thread: it must find loopback excepted there,
    # and need not look where no proxy is set.
    proxied = bool(urllib.request.getproxies())
    if proxied:
        os.environ.update(bypass_proxies(os.environ))
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
        trust_env=proxied,
    )

    async def leave_open() -> None:
        """Others share it."""

    session.close = leave_open  # type: ignore[method-assign]  # its class warns against subclasses
    return session
