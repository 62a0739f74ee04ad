"""A page at the address of `areal serve`: talk to the model, see how sure it was of each token, and what else it might
have said there.

The page is a client like any other and needs the key, which it gets from the part of its address that browsers do not
send, or from who uses it. Everything but the page and its scripts is the proxy's to answer.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal.viewer.app import as_page, static_file
from areal.viewer.frame import ASSETS, Links, heading, page
from areal.viewer.html import Markup, data_block, el
from areal.viewer.server import with_headers

PLAYGROUND = "/playground"


class WithPlayground:
    def __init__(self, app: ASGIApp, model: str) -> None:
        self._app = app
        self._model = model
        routes = [Route(PLAYGROUND, self._page, methods=["GET"]), Route(f"/{ASSETS}/{{name}}", static_file)]
        self._pages = Starlette(routes=routes, exception_handlers={HTTPException: as_page})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == PLAYGROUND or path.startswith(f"/{ASSETS}/"):
            await self._pages(scope, receive, with_headers(send))
        else:
            await self._app(scope, receive, send)

    def _page(self, request: Request) -> Response:
        return HTMLResponse(playground_page(self._model), headers={"cache-control": "no-store"})


def playground_page(model: str) -> str:
    box = el("textarea", id="prompt", rows=3, aria_label="Message", placeholder="Say something; Enter sends it")
    send = el("button", "Send", type="submit", id="send")
    anew = el("button", "Begin anew", type="button", id="anew")
    settings = [
        _setting("Temperature", "temperature", "1", maximum="2", step="0.1"),
        _setting("Tokens at most", "tokens", "256", maximum="100000", step="1"),
        el("label", "Key ", el("input", type="password", id="key", autocomplete="off")),
    ]
    return page(
        Links(),
        "Playground",
        heading(
            model,
            "Each token is coloured by how likely the model found it; point at one, or use the arrow keys, for its "
            "figures and for what the model might have said instead.",
        ),
        el("div", id="said", class_="conversation", role="log", aria_label="Conversation"),
        el("p", id="wrong", role="alert", class_="error"),
        el("p", id="token-facts", role="status", class_="note"),
        el("form", box, el("div", send, anew, settings, class_="controls"), id="talk", class_="talk"),
        data_block("playground-data", {"model": model}),
        scripts=("playground.js",),
    )


def _setting(label: str, name: str, value: str, **limits: str) -> Markup:
    return el("label", f"{label} ", el("input", type="number", id=name, value=value, min="0", max=limits["maximum"],
                                        step=limits["step"]))  # fmt: skip
