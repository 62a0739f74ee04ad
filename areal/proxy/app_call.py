"""One request through the app without a network: the app runs as a task, its answer is taken chunk by chunk.

Closing before the end cancels the app, which counts its answer as sent when the end of it was taken. Knows nothing of
any HTTP library.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Scope

QUEUED_CHUNKS = 64
"""How far an answer may run ahead of its reader."""
CLOSE_SECONDS = 5.0


class AppCall:
    def __init__(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        self._body: bytes | None = body
        self._closed = asyncio.Event()
        self._taken = asyncio.Event()
        """The whole answer was."""
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
        """Tell the app that its client went away, end it, and wait until it has."""
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
            # Wakes a reader that waits; one that finds messages meets the end of the task behind them.
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
    """What ASGI wants to know of a request; `url` is an httpx URL."""
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
