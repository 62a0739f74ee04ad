"""The proxy as its owner sees it: start it, open a session per episode, end it, close.

Belongs to one event loop. Its app is reached over TCP at `base_url`, and in process through `http_client` and
`httpx2_client`, whose calls to the same URL use no network.
"""

import asyncio
import importlib
import secrets
from collections.abc import Callable
from typing import Any

import httpx
from starlette.types import ASGIApp

from areal.api.engine_api import InferenceEngine
from areal.config.rollout import GenerationHyperparameters, ProxyLimits
from areal.infra.app_server import AppServer
from areal.proxy.app import App
from areal.proxy.generation import Generation
from areal.proxy.online import OnlineSessions, SessionRoutes
from areal.proxy.server import proxy_server
from areal.proxy.sessions import REMEDY, Session, Sessions
from areal.proxy.transport import shared_client
from areal.trajectory.rendering import Renderer
from areal.trajectory.tree import Tree

END_SECONDS = 5.0


class Proxy:
    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        *,
        gconfig: GenerationHyperparameters,
        max_positions: int,
        limits: ProxyLimits | None = None,
        drop_params: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        processor: Any = None,
        model_name: str = "default",
        admin_key: str | None = None,
        self_reward: bool = False,
        public_url: str = "",
        trained: bool = True,
        strict_model: bool = False,
        key_remedy: str = REMEDY,
    ) -> None:
        """`limits` to `reasoning_parser` are those of `ProxyConfig`; `processor` is the model's, None = it takes no
        images; `admin_key` None = one made for this proxy; `public_url` = where agents outside reach it, empty = the
        address they connected to; `trained` and `strict_model` as in `App`; `key_remedy` tells who has no key.
        """
        limits = limits or ProxyLimits()
        self._limits = limits
        self._renderer = Renderer(tokenizer, tool_parser, reasoning_parser, processor)
        self._generation = Generation(engine, self._renderer, max_positions, model_name, limits.call_timeout_seconds)
        self._gconfig = self._generation.defaults(gconfig)
        self._sessions = Sessions(limits, key_remedy)
        self.admin_key = admin_key or f"sk-areal-admin-{secrets.token_hex(24)}"
        """Manages sessions over HTTP, and calls no model."""
        self.online = OnlineSessions(self.open_session, self.end_session, limits)
        """Sessions that are managed over HTTP."""
        self._public_url = public_url
        routes = SessionRoutes(self.online, self._sessions, limits, self.admin_key, self_reward, public_url)
        self._app = App(
            self._sessions, self._generation, routes, limits, drop_params, trained=trained, strict_model=strict_model
        )
        self._server: AppServer | None = None
        self._clients: dict[str, Any] = {}

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        exposed: bool = False,
        around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        """Listen; port 0 = a free one. Hosts beyond loopback need `exposed`; `around` may answer at other paths."""
        server = proxy_server(
            around(self._app),
            host,
            port,
            head_seconds=self._limits.body_timeout_seconds,
            exposed=exposed,
            public_url=self._public_url,
        )
        await server.start()
        self._server = server

    @property
    def origin(self) -> str:
        """`http://HOST:PORT`"""
        if self._server is None:
            raise RuntimeError("the proxy is not running; await proxy.start() first")
        return self._server.origin

    @property
    def http_client(self) -> httpx.AsyncClient:
        """Shared by all agents of the process; closing it does nothing, `aclose` of the proxy does."""
        client: httpx.AsyncClient = self._client("httpx")
        return client

    @property
    def httpx2_client(self) -> Any:
        """The same for SDKs that want httpx2, which must be installed."""
        return self._client("httpx2")

    def __len__(self) -> int:
        """Sessions open now."""
        return len(self._sessions)

    def open_session(
        self,
        *,
        gconfig: GenerationHyperparameters | None = None,
        api_key: str | None = None,
        seed: int | None = None,
    ) -> Session:
        """A conversation space with its own key.

        `gconfig` = how to sample unless a request says otherwise; `seed` decides what its calls draw.
        """
        sampling = self._gconfig if gconfig is None else self._generation.defaults(gconfig)
        return self._sessions.open(self.origin, Tree(self._renderer), sampling, api_key=api_key, seed=seed)

    async def end_session(self, session: Session) -> None:
        """Refuse its key from now on (410) and abort its running calls; its tree stays readable."""
        self._sessions.end(session)
        running = dict(session.calls)
        for end in running.values():
            end()
        if running:
            await asyncio.wait(running, timeout=END_SECONDS)
        session.tree.forget_lost()

    async def aclose(self) -> None:
        await self.online.aclose()
        for session in self._sessions:
            await self.end_session(session)
        for client in self._clients.values():
            await client.end()
        self._clients.clear()
        if self._server is not None:
            await self._server.stop()
            self._server = None

    def _client(self, module_name: str) -> Any:
        if module_name not in self._clients:
            module = importlib.import_module(module_name)
            self._clients[module_name] = shared_client(module, self._app, [self.origin])
        return self._clients[module_name]
