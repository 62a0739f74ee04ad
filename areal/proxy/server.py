"""Where the proxy listens over TCP, and which requests it serves there.

Every answer has an id, in the headers that SDKs look at, by which its client can speak of it.

On loopback only requests for this machine are served: a web page can give a name of its own this machine's address (DNS
rebinding), but the `Host` that its browser sends is still that name. Ports are not compared, so tunnels work.
"""

import itertools
import secrets
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.config.errors import ConfigError
from areal.infra.app_server import AppServer, listen
from areal.proxy.delivery import error_response
from areal.proxy.dialects import dialect_of_request
from areal.proxy.errors import ApiError
from areal.utils.net import is_loopback
from areal.utils.shorten import shown

MISDIRECTED_REQUEST = 421


def proxy_server(
    app: ASGIApp, host: str, port: int, *, head_seconds: float, exposed: bool = False, public_url: str = ""
) -> AppServer:
    """`exposed` = it may listen beyond this machine; `public_url` names another host that requests may be for."""
    if not exposed and not is_loopback(host):
        raise ConfigError(f"the proxy listens on loopback addresses only, got {host!r}; use 127.0.0.1")
    listening = listen(host, port, "the proxy")
    if is_loopback(listening.getsockname()[0]):
        app = _ForThisMachine(app, urlsplit(public_url).hostname)
    return AppServer(_WithRequestIds(app), listening, head_seconds=head_seconds, name="the proxy")


class _WithRequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._process = secrets.token_hex(6)
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = f"req_{self._process}{next(self._numbers):08x}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(b"x-request-id", name), (b"request-id", name)]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        await self._app(scope, receive, send_with_id)


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
        dialect = dialect_of_request(scope["path"], scope["headers"])
        await error_response(dialect, refusal)(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name == self._public_name


def _name_of(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip().lower()
