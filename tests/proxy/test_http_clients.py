import asyncio

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI

from areal.proxy.transport import AppCall, shared_client

WAIT_SECONDS = 10
ORIGIN = "http://127.0.0.1:1"


class ChunkedApp:
    """Sends a chunk each time it is allowed to, and notes how it ended."""

    def __init__(self):
        self.allowed = asyncio.Queue()
        self.ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (chunk := await self.allowed.get()) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended.set()


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def module(request):
    return request.param


@pytest.mark.parametrize("name", ["http_client", "httpx2_client"])
async def test_sdk_works_with_either_client(proxy, session, name):
    sdk = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=getattr(proxy, name))
    completion = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert completion.id == session.tree.last.id


async def test_client_outlives_an_agent_that_closes_it(proxy, session):
    async with AsyncOpenAI(base_url=session.base_url, api_key="x", http_client=proxy.http_client):
        pass
    async with proxy.http_client as client:
        await client.aclose()
    assert (await proxy.http_client.get(f"{session.base_url}/models")).status_code == 200


async def test_proxys_end_closes_the_client(proxy):
    client = proxy.http_client
    await proxy.aclose()
    assert client.is_closed


async def test_own_address_never_leaves_the_process(proxy, session):
    """The server at the address is gone, and the client does not notice."""
    client = proxy.http_client
    await proxy._server.stop()
    assert (await client.get(f"{session.base_url}/models")).status_code == 200


async def test_other_addresses_are_reached_over_the_network(proxy, start_proxy):
    other = await start_proxy()
    response = await proxy.http_client.get(f"{other.origin}/v1/models", headers={"x-api-key": "foreign"})
    assert response.status_code == 401


async def test_loopback_ignores_the_environments_proxy(monkeypatch, start_proxy):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    one, other = await start_proxy(), await start_proxy()
    assert (await one.http_client.get(f"{one.origin}/health")).status_code == 200
    assert (await one.http_client.get(f"{other.origin}/health")).status_code == 200


async def test_chunks_arrive_as_they_are_sent(module):
    app = ChunkedApp()
    client = shared_client(module, app, [ORIGIN])
    app.allowed.put_nowait(b"one")
    async with asyncio.timeout(WAIT_SECONDS), client.stream("GET", ORIGIN) as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"one"
        app.allowed.put_nowait(b"two")
        assert await anext(chunks) == b"two"
        app.allowed.put_nowait(None)
        assert [chunk async for chunk in chunks] == []
    await client.end()


async def test_leaving_a_stream_ends_the_app(module):
    app = ChunkedApp()
    client = shared_client(module, app, [ORIGIN])
    app.allowed.put_nowait(b"one")
    async with client.stream("GET", ORIGIN):
        pass
    async with asyncio.timeout(WAIT_SECONDS):
        await app.ended.wait()
    await client.end()


async def test_answer_that_takes_too_long_is_a_read_timeout(module):
    app = ChunkedApp()
    client = shared_client(module, app, [ORIGIN])
    with pytest.raises(module.ReadTimeout):
        await client.get(ORIGIN, timeout=0.01)
    assert app.ended.is_set()
    await client.end()


async def test_app_that_ends_without_an_answer_is_a_protocol_error(module):
    async def silent(scope, receive, send):
        return None

    client = shared_client(module, silent, [ORIGIN])
    with pytest.raises(module.RemoteProtocolError):
        await client.get(ORIGIN)
    await client.end()


async def test_app_hears_that_its_client_went_away():
    heard = []

    async def listening(scope, receive, send):
        while True:
            heard.append((await receive())["type"])

    call = AppCall(listening, {"type": "http"}, b"")
    with pytest.raises(TimeoutError):
        await call.start(0.01)
    await call.aclose()
    assert heard == ["http.request"]
