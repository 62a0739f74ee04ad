"""HTTP clients whose calls to the proxy's own address never leave the process.

Every other address is reached over the network as usual. The same code serves httpx and httpx2, which are one interface
in two modules: SDKs insist on the one or the other.
"""

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

from starlette.types import ASGIApp

from areal.proxy.app_call import AppCall, scope_of

CALL_SECONDS = 600.0
CONNECT_SECONDS = 10.0
LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")


def shared_client(module: ModuleType, app: ASGIApp, origins: list[str]) -> Any:
    """An `AsyncClient` of that module for all agents of a process; `end()` closes it.

    `aclose` is for its users, who may wrap it in an SDK's `async with`: it leaves the client open for the others.
    """
    http: Any = module

    class SharedClient(http.AsyncClient):
        async def aclose(self) -> None:
            """Leave the client open: others share it."""

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            """Leave the client open: others share it."""

        async def end(self) -> None:
            await super().aclose()

    # A loopback address without a transport of its own gets the plain one, whatever HTTP_PROXY says.
    mounts: dict[str, Any] = dict.fromkeys(LOOPBACK)
    mounts |= dict.fromkeys(origins, in_process_transport(module, app))
    return SharedClient(
        mounts=mounts,
        timeout=http.Timeout(CALL_SECONDS, connect=CONNECT_SECONDS),
        limits=http.Limits(max_connections=None, max_keepalive_connections=256),
    )


def in_process_transport(module: ModuleType, app: ASGIApp) -> Any:
    """A transport of that module which runs the app."""
    http: Any = module

    class Chunks(http.AsyncByteStream):
        def __init__(self, call: AppCall, first: bytes, timeout_seconds: float | None) -> None:
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
            call = AppCall(app, scope_of(request.method, request.url, request.headers.raw), body)
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
