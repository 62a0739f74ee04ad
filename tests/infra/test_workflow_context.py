import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext

Handler = Callable[[web.Request], Awaitable[web.Response]]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server on a loopback address that answers with the path it was asked for."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=str(request.rel_url))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await workflow_context.close_clients()
    await runner.cleanup()


async def served(answer: Handler, stack: Any) -> str:
    """The URL of a server that answers like this, until the test is over."""
    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stack.push_async_callback(workflow_context.close_clients)
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_outside_an_episode_there_is_a_default_context() -> None:
    assert workflow_context.get() == WorkflowContext()
    assert workflow_context.get().task_id is None
    assert workflow_context.stat_scope() == "rollout"


def test_evaluation_has_its_own_statistics_scope() -> None:
    with workflow_context.enter(WorkflowContext(is_eval=True)):
        assert workflow_context.stat_scope() == "eval-rollout"
    assert workflow_context.stat_scope() == "rollout"


async def test_each_episode_sees_its_own_context_also_in_threads() -> None:
    barrier = asyncio.Barrier(3)

    async def episode(task_id: int) -> tuple[int | None, int | None]:
        with workflow_context.enter(WorkflowContext(task_id=task_id)):
            await barrier.wait()
            here = workflow_context.get().task_id
            there = await asyncio.to_thread(lambda: workflow_context.get().task_id)
            return here, there

    assert await asyncio.gather(*map(episode, range(3))) == [(0, 0), (1, 1), (2, 2)]


async def test_one_client_of_each_kind_is_shared_on_a_loop(url: str) -> None:
    client, session = await workflow_context.get_httpx_client(), await workflow_context.get_aiohttp_session()
    assert await workflow_context.get_httpx_client() is client
    assert await workflow_context.get_aiohttp_session() is session
    assert (await client.get(f"{url}/a")).text == "/a"
    async with session.get(f"{url}/b") as response:
        assert await response.text() == "/b"


async def test_episode_that_closes_a_shared_client_leaves_it_to_the_others(url: str) -> None:
    client, session = await workflow_context.get_httpx_client(), await workflow_context.get_aiohttp_session()
    async with AsyncOpenAI(base_url=url, api_key="k", http_client=client), session:
        pass
    await client.aclose()
    await session.close()
    async with client:
        assert (await client.get(url)).status_code == 200
    async with session.get(url) as response:
        assert response.status == 200
    await workflow_context.close_clients()
    assert client.is_closed
    assert session.closed


async def test_connections_are_kept_for_the_next_request(stack: Any) -> None:
    ports: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.Response()

    url = await served(answer, stack)
    client, session = await workflow_context.get_httpx_client(), await workflow_context.get_aiohttp_session()
    for _ in range(3):
        await client.get(url)
        async with session.get(url) as response:
            await response.read()
    assert len(set(ports)) == 2


async def test_agent_gets_the_client_of_its_episode() -> None:
    async with httpx.AsyncClient() as client:
        with workflow_context.enter(WorkflowContext(http_client=client)):
            assert await workflow_context.get_httpx_client() is client


async def test_more_than_a_hundred_requests_run_at_once(stack: Any) -> None:
    together = asyncio.Barrier(101)

    async def answer(request: web.Request) -> web.Response:
        await together.wait()
        return web.Response()

    url = await served(answer, stack)
    client, session = await workflow_context.get_httpx_client(), await workflow_context.get_aiohttp_session()
    answers = await asyncio.wait_for(asyncio.gather(*(client.get(url) for _ in range(101))), 60)
    assert {answer.status_code for answer in answers} == {200}
    others = await asyncio.wait_for(asyncio.gather(*(session.get(url) for _ in range(101))), 60)
    assert {other.status for other in others} == {200}


def test_clients_belong_to_a_loop_and_are_closed_with_it() -> None:
    async def use() -> tuple[httpx.AsyncClient, aiohttp.ClientSession]:
        return await workflow_context.get_httpx_client(), await workflow_context.get_aiohttp_session()

    first, second = asyncio.run(use()), asyncio.run(use())
    assert first[0] is not second[0]
    assert first[1] is not second[1]
    assert all(client.is_closed and session.closed for client, session in (first, second))


async def test_loopback_calls_ignore_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert (await (await workflow_context.get_httpx_client()).get(f"{url}/a")).text == "/a"
    async with (await workflow_context.get_aiohttp_session()).get(f"{url}/b") as response:
        assert await response.text() == "/b"


async def test_other_addresses_use_the_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    answer = await (await workflow_context.get_httpx_client()).get("http://example.invalid/x")
    assert answer.text.endswith("/x")
    async with (await workflow_context.get_aiohttp_session()).get("http://example.invalid/y") as response:
        assert (await response.text()).endswith("/y")
