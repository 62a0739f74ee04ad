from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from areal.config.rollout import GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.proxy import Proxy, ProxyLimits, Session

POSITIONS = 512


class AnsweringEngine(FakeEngine):
    """Gives the same answer to every request: ids, or a text and the model's end token."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(
            vocab_size=len(tokenizer), tokenizer=tokenizer, script=lambda ids: self._answer_ids(), constrained=False
        )
        self.tokenizer = tokenizer
        self.answer: str | list[int] = "1259"

    def _answer_ids(self) -> list[int]:
        if isinstance(self.answer, list):
            return self.answer
        return [*self.tokenizer.encode(self.answer, add_special_tokens=False), self.tokenizer.eos_token_id]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(["Sort 5291 into 1259, hello there, add the numbers"] * 4, 300, POSITIONS)


@pytest.fixture
async def engine(tokenizer: Any) -> AnsweringEngine:
    return AnsweringEngine(tokenizer)


StartProxy = Callable[..., Awaitable[Proxy]]


@pytest.fixture
async def start_proxy(engine: AnsweringEngine) -> AsyncIterator[StartProxy]:
    started: list[Proxy] = []

    async def start(limits: ProxyLimits | None = None, *, temperature: float = 1.0, **options: Any) -> Proxy:
        """`options` are those of `Proxy`."""
        gconfig = GenerationHyperparameters(max_new_tokens=64, temperature=temperature)
        options.setdefault("max_positions", POSITIONS)
        proxy = Proxy(engine, engine.tokenizer, gconfig=gconfig, limits=limits, **options)
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
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(transport: str, proxy: Proxy, session: Session) -> AsyncIterator[AsyncOpenAI]:
    """The official SDK, in process and over TCP."""
    http_client = proxy.http_client if transport == "in process" else None
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=http_client, max_retries=0
    ) as sdk:
        yield sdk


@pytest.fixture
async def claude(transport: str, proxy: Proxy, session: Session) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's SDK, in process and over TCP."""
    http_client = proxy.httpx2_client if transport == "in process" else None
    async with AsyncAnthropic(
        base_url=session.base_url, api_key=session.api_key, http_client=http_client, max_retries=0
    ) as sdk:
        yield sdk
