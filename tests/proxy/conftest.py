import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from areal.api.engine_api import EngineHealth, WeightUpdate
from areal.api.io_struct import ModelRequest, ModelResponse, TokenChunk
from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.proxy import Proxy, ProxyLimits, Session

POSITIONS = 512


@dataclass
class ScriptedEngine:
    """Says what it is told to say. With `hold` it waits until released, or until its caller gives up.

    A stream goes a token at a time; with `interrupt` it waits before that token, then fails if it has a `failure`.
    """

    tokenizer: Any
    answer: str | list[int] = "1259"
    hold: bool = False
    failure: Exception | None = None
    interrupt: int | None = None
    requests: list[ModelRequest] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        self._count(1)
        try:
            if self.hold:
                await self.release.wait()
        finally:
            self._count(-1)
        if self.failure is not None:
            raise self.failure
        return self._response(req)

    async def astream(self, req: ModelRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(req)
        self._count(1)
        try:
            if self.hold:
                await self.release.wait()
            if self.failure is not None and self.interrupt is None:
                raise self.failure
            response = self._response(req)
            count = len(response.output_tokens)
            for number, token in enumerate(response.output_tokens):
                await asyncio.sleep(0)
                await self._interrupted(number)
                yield TokenChunk([token], [-0.25], [7], response if number == count - 1 else None)
        finally:
            self._count(-1)

    async def _interrupted(self, number: int) -> None:
        if number == self.interrupt:
            await self.release.wait()
            if self.failure is not None:
                raise self.failure

    async def until_running(self, count: int) -> None:
        """Wait until that many generations are in flight."""
        async with asyncio.timeout(10):
            while self.running != count:
                self.changed.clear()
                await self.changed.wait()

    def _count(self, change: int) -> None:
        self.running += change
        self.changed.set()

    def _response(self, req: ModelRequest) -> ModelResponse:
        output = self.answer
        if isinstance(output, str):
            output = [*self.tokenizer.encode(output, add_special_tokens=False), self.tokenizer.eos_token_id]
        cut = output[: req.gconfig.max_new_tokens]
        ended = cut[-1] in req.gconfig.stop_token_ids or len(cut) == len(output)
        return ModelResponse(
            req.input_ids, cut, [-0.25] * len(cut), [7] * len(cut), "stop" if ended else "length", {7: "digest"}
        )

    async def update_weights(self, update: WeightUpdate) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> EngineHealth:
        if self.failure is not None:
            raise self.failure
        return EngineHealth(7, "digest", self.running, 0, False)

    async def aclose(self) -> None: ...


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(["Sort 5291 into 1259, hello there, add the numbers"] * 4, 300, POSITIONS)


@pytest.fixture
async def engine(tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


StartProxy = Callable[..., Awaitable[Proxy]]


@pytest.fixture
async def start_proxy(engine: ScriptedEngine, tokenizer: Any) -> AsyncIterator[StartProxy]:
    started: list[Proxy] = []

    async def start(
        limits: ProxyLimits | None = None,
        *,
        drop_params: bool = False,
        self_reward: bool = False,
        max_positions: int = POSITIONS,
        **gconfig: Any,
    ) -> Proxy:
        sampling = GenerationHyperparameters(**{"max_new_tokens": 64, **gconfig})
        proxy = Proxy(
            engine,
            engine.tokenizer,
            gconfig=sampling,
            max_positions=max_positions,
            limits=limits,
            drop_params=drop_params,
            self_reward=self_reward,
        )
        started.append(proxy)
        await proxy.start()
        return proxy

    yield start
    for proxy in started:
        await proxy.aclose()


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    return await start_proxy()


@pytest.fixture
def session(proxy: Proxy) -> Session:
    return proxy.open_session()


@pytest.fixture(params=["in process", "over TCP"])
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(door: str, proxy: Proxy, session: Session) -> AsyncIterator[AsyncOpenAI]:
    """The official SDK, through each door."""
    http_client = proxy.http_client if door == "in process" else None
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=http_client, max_retries=0
    ) as sdk:
        yield sdk


@pytest.fixture
async def claude(door: str, proxy: Proxy, session: Session) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's SDK, through each door."""
    http_client = proxy.httpx2_client if door == "in process" else None
    async with AsyncAnthropic(
        base_url=session.base_url, api_key=session.api_key, http_client=http_client, max_retries=0
    ) as sdk:
        yield sdk
