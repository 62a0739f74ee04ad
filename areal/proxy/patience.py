"""How long, and how much, a connection may take to say what it wants: a head that only trickles is given up.

The body behind it has its own deadline and size, where it is read.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_BYTES = 64 * 2**10


def patient_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with a deadline and a size for each request's head."""
    base: Any = AutoHTTPProtocol

    class PatientProtocol(base):
        def connection_made(self, transport: asyncio.Transport) -> None:
            self._head_bytes = 0
            self._deadline: asyncio.TimerHandle | None = None
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_head()
                return
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.abort()
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            if self._deadline is None:
                self._deadline = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

        def _forget_head(self) -> None:
            self._head_bytes = 0
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return PatientProtocol
