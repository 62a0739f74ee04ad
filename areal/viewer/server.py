"""Who may look: this machine alone by default, and whoever has the token of the printed address beyond it.

On loopback a request must be for this machine by name: a web page can give a name of its own this machine's address
(DNS rebinding), but the `Host` that its browser sends is still that name. A script of another page says so in `Origin`
and is refused. Ports are not compared, so tunnels work. Beyond loopback every request needs the token, which the
printed address gives the browser once and a cookie keeps.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.infra.app_server import AppServer, listen
from areal.utils.net import is_loopback
from areal.utils.shorten import shown

HEAD_SECONDS = 10.0
"""For the head of a request."""
TOKEN = "token"
ANY_ADDRESS = ("0.0.0.0", "::")
"""What listens there is reached by the name of the machine."""
MISDIRECTED_REQUEST = 421
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class ViewServer:
    """The app at an address. `url` is what people open."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Raises ConfigError if nothing can listen there."""
        listening = listen(host, port, "the viewer")
        bound = listening.getsockname()[0]
        token = None if is_loopback(bound) else secrets.token_urlsafe(24)
        self._server = AppServer(Guarded(app, token), listening, head_seconds=HEAD_SECONDS, name="the viewer")
        origin = self._server.origin
        if bound in ANY_ADDRESS:
            origin = f"http://{socket.gethostname()}:{listening.getsockname()[1]}"
        self.url = f"{origin}/" + (f"?{TOKEN}={token}" if token else "")

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()


async def serve(app: ASGIApp, host: str, port: int, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Until `stop`; `say` gets the address."""
    server = ViewServer(app, host, port)
    await server.start()
    try:
        say(server.url)
        await stop.wait()
    finally:
        await server.stop()


class Guarded:
    """The app for those who may look, with headers that keep a browser from running anything but its scripts."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        """`token` None = it listens on loopback."""
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        app = self._refusal(scope) or self._app
        await app(scope, receive, with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if self._token is None:
            foreign = next((host for host in hosts if not is_loopback(name_of(host))), None)
            if foreign is not None or not hosts:
                rule = f"the Host of a request must be 127.0.0.1, localhost or [::1], got {shown(foreign or '')}"
                return _refuse(MISDIRECTED_REQUEST, f"{rule}; use the address that areal view printed")
        if any(urlsplit(origin).netloc not in hosts for origin in origins):
            return _refuse(403, f"pages of other sites may not ask the viewer, got Origin {shown(origins[0])}")
        if scope["method"] not in ("GET", "HEAD"):
            return _refuse(405, f"the viewer only shows: use GET, got {shown(scope['method'])}")
        return None if self._token is None else self._without_token(scope, headers, self._token)

    def _without_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        """A refusal, or the way to the page without the token in its address; None = it has the cookie."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == TOKEN), None)
        if given is not None and _equal(given, token):
            rest = urlencode([(name, value) for name, value in query if name != TOKEN])
            path = "/" + scope["path"].lstrip("/")  # two slashes would be another host
            response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            response.set_cookie(_cookie(headers), token, httponly=True, samesite="strict")
            return response
        if _equal(_cookie_value(headers), token):
            return None
        return _refuse(403, "this viewer needs the token of its address; open the one that areal view printed")


def with_headers(send: Send) -> Send:
    """What sends an answer with the headers above."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return answer


def name_of(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip().lower()


def _cookie(headers: Headers) -> str:
    """One for each port: browsers send the cookies of a host to all of them."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"areal-view-{port if port.isdigit() else 80}"


def _cookie_value(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_cookie(headers))
    except CookieError:
        return ""
    return "" if found is None else found.value


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _refuse(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
