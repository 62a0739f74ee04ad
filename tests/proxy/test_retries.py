import asyncio
import json

import openai
import pytest
from conversations import BODIES, QUESTION, post

from areal.api.errors import EngineError
from areal.proxy import ProxyLimits
from areal.proxy.transport import AppCall, scope_of

WAIT_SECONDS = 10


def retry(count):
    return {"x-stainless-retry-count": str(count)}


async def settled(tasks):
    async with asyncio.timeout(WAIT_SECONDS):
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("headers", [retry(1), retry(2)])
async def test_marked_retry_gets_the_recorded_answer(proxy, session, engine, route, stream, headers):
    first = await post(proxy, session, route=route, stream=stream)
    again = await post(proxy, session, headers, route=route, stream=stream)
    assert again.status_code == 200
    assert _said(again) == _said(first)
    assert len(session.tree.completions) == len(engine.requests) == 1


def _said(response):
    """An answer without what depends on how its stream was cut."""
    if "event-stream" not in response.headers["content-type"]:
        return response.json()
    frames = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    first, *_, last = [json.loads(frame) for frame in frames]
    for frame in (first, last):
        frame.pop("sequence_number", None)
    return first, last


@pytest.mark.parametrize("answer", ["1259", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'])
async def test_replayed_stream_says_what_was_said(client, session, engine, answer):
    engine.answer = answer
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    async def said(headers):
        stream = await client.chat.completions.create(
            model="m", messages=[QUESTION], tools=tools, stream=True, extra_headers=headers
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        calls = [call.model_dump() for delta in deltas for call in delta.tool_calls or ()]
        return "".join(delta.content or "" for delta in deltas), calls

    assert await said({}) == await said(retry(1))
    assert len(session.tree.completions) == 1


async def test_idempotency_key_names_one_answer(proxy, session, engine):
    key = {"idempotency-key": "k1"}
    answers = [await post(proxy, session, key) for _ in range(3)]
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = await post(proxy, session, {"idempotency-key": "k2"})
    assert other.json()["id"] != answers[0].json()["id"]
    assert len(session.tree.completions) == 2


async def test_idempotency_key_with_another_body_is_a_conflict(proxy, session):
    await post(proxy, session, {"idempotency-key": "k1"})
    answer = await post(proxy, session, {"idempotency-key": "k1"}, temperature=0.5)
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "idempotency_key_reused"
    assert len(session.tree.completions) == 1


async def test_keys_and_marks_of_one_session_mean_nothing_in_another(proxy, session):
    other = proxy.open_session()
    first = await post(proxy, session, {"idempotency-key": "k1"})
    second = await post(proxy, other, {"idempotency-key": "k1"} | retry(1))
    assert first.json()["id"] != second.json()["id"]
    assert len(other.tree.completions) == 1


async def test_same_body_sent_twice_on_purpose_is_two_samples(proxy, session, engine):
    one, two = await settled([post(proxy, session), post(proxy, session)])
    three = await post(proxy, session)
    assert len({answer.json()["id"] for answer in (one, two, three)}) == 3
    assert len(session.tree.completions) == 3


async def test_retries_of_two_equal_calls_get_an_answer_each(proxy, session):
    firsts = await settled([post(proxy, session), post(proxy, session)])
    again = await settled([post(proxy, session, retry(1)), post(proxy, session, retry(1))])
    assert {answer.json()["id"] for answer in again} == {answer.json()["id"] for answer in firsts}
    assert len(session.tree.completions) == 2


async def test_mark_on_another_body_is_no_retry(proxy, session):
    await post(proxy, session)
    await post(proxy, session, retry(1), temperature=0.5)
    assert len(session.tree.completions) == 2


@pytest.mark.parametrize("count", ["", "-1", "one", "²", "9" * 5000])
async def test_mark_that_is_no_number_marks_nothing(proxy, session, count):
    url, body = f"{session.base_url}/chat/completions", json.dumps({"messages": [QUESTION]}).encode()
    headers = [(b"x-stainless-retry-count", count.encode())]
    answers = [await proxy.http_client.post(url, content=body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(session.tree.completions) == 2


async def test_retry_of_a_running_call_joins_it(proxy, session, engine):
    engine.hold = asyncio.Event()
    first = asyncio.create_task(post(proxy, session))
    await engine.until_in_flight(1)
    again = asyncio.create_task(post(proxy, session, retry(1)))
    await _calls(session, 2)
    engine.hold.set()
    answers = await settled([first, again])
    assert answers[0].json() == answers[1].json()
    assert len(engine.requests) == len(session.tree.completions) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_retry_keeps_the_call_when_the_first_client_leaves(proxy, session, engine, stream):
    engine.hold = asyncio.Event()
    first = asyncio.create_task(post(proxy, session, stream=stream))
    await engine.until_in_flight(1)
    again = asyncio.create_task(post(proxy, session, retry(1), stream=stream))
    await _calls(session, 2)
    first.cancel()
    await asyncio.wait((first,))
    assert engine.in_flight == 1
    engine.hold.set()
    assert (await again).status_code == 200
    assert len(engine.requests) == len(session.tree.completions) == 1


async def test_call_is_aborted_when_all_its_clients_left(proxy, session, engine):
    engine.hold = asyncio.Event()
    calls = [asyncio.create_task(post(proxy, session, retry(count))) for count in range(4)]
    await _calls(session, 4)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await engine.until_in_flight(0)
    assert session.tree.completions == []
    assert not session.calls


async def test_retry_storm_leaves_one_node(proxy, session, engine):
    engine.hold = asyncio.Event()
    storm = [asyncio.create_task(post(proxy, session, retry(1 + count % 3))) for count in range(60)]
    await _calls(session, 60)
    engine.hold.set()
    answers = await settled(storm)
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(session.tree.completions) == len(engine.requests) == 1


async def test_sdk_that_gives_up_and_retries_leaves_one_node(proxy, session, engine, transport):
    engine.hold = asyncio.Event()
    http_client = proxy.http_client if transport == "in process" else None
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=http_client, max_retries=3, timeout=0.3
    ) as sdk:
        call = asyncio.create_task(sdk.chat.completions.create(model="m", messages=[QUESTION]))
        for count in (1, 0, 1):
            await engine.until_in_flight(count)
        engine.hold.set()
        answer = await call
    assert [node.id for node in session.tree.completions] == [answer.id]
    assert engine.in_flight == 0


async def test_retry_of_a_failed_call_is_sampled_again(proxy, session, engine):
    good = await post(proxy, session)
    engine.failure = EngineError("it died")
    assert (await post(proxy, session)).status_code == 503
    engine.failure = None
    again = await post(proxy, session, retry(1))
    assert again.json()["id"] != good.json()["id"], "the call that failed was another sample"
    assert len(session.tree.completions) == 2


async def test_retry_of_a_refused_call_is_sampled_again(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(max_calls_per_session=1))
    session = proxy.open_session()
    good = await post(proxy, session)
    engine.hold = asyncio.Event()
    running = asyncio.create_task(post(proxy, session, temperature=0.5))
    await engine.until_in_flight(1)
    assert (await post(proxy, session)).status_code == 429
    engine.hold.set()
    await running
    again = await post(proxy, session, retry(1))
    assert again.json()["id"] != good.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_same_body_joins_an_answer_that_was_never_delivered(proxy, session, engine, stream):
    lost = await _lost_answer(proxy, session, stream)
    assert session.tree.last is None, "no client received it"
    answer = await post(proxy, session, stream=stream)
    assert lost.id in answer.text
    assert session.tree.last is lost
    assert len(engine.requests) == 1
    await post(proxy, session, stream=stream)
    assert len(session.tree.completions) == 2, "the next one is a sample of its own"


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_was_never_delivered_is_not_exported(proxy, session, stream):
    kept = (await post(proxy, session, temperature=0.5)).json()["id"]
    await _lost_answer(proxy, session, stream)
    await post(proxy, session, messages=[QUESTION, {"role": "assistant", "content": "1259"}, QUESTION])
    await proxy.end_session(session)
    assert session.tree.completions[0].id == kept
    assert [node.index for node in session.tree.completions] == [0, 1]
    assert [node.parent for node in session.tree.completions] == [None, 0]


async def _lost_answer(proxy, session, stream):
    """An answer that was recorded, but whose client left before it took it."""
    body = {"messages": [QUESTION], "stream": stream}
    request = proxy.http_client.build_request("POST", f"{session.base_url}/chat/completions", json=body)
    scope = scope_of("POST", request.url, request.headers.raw)
    before = len(session.tree.completions)
    call = AppCall(proxy._app, scope, request.content)
    await _until(lambda: len(session.tree.completions) > before)
    await call.aclose()
    return session.tree.completions[-1]


async def test_connection_that_breaks_and_comes_again_leaves_one_node(proxy, session, engine):
    engine.hold = asyncio.Event()
    host, port = proxy.origin.removeprefix("http://").split(":")
    body = json.dumps({"messages": [QUESTION]}).encode()
    path = f"/s/{session.token}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    for _ in range(5):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await engine.until_in_flight(1)
        writer.close()
        await engine.until_in_flight(0)
    engine.hold.set()
    answer = await proxy.http_client.post(f"{session.base_url}/chat/completions", content=body)
    assert [node.id for node in session.tree.completions] == [answer.json()["id"]]


async def test_what_is_remembered_is_bounded(start_proxy):
    proxy = await start_proxy(ProxyLimits(remembered_answers=2))
    session = proxy.open_session()
    for temperature in (0.1, 0.2, 0.3):
        await post(proxy, session, temperature=temperature)
    await post(proxy, session, retry(1), temperature=0.3)
    assert len(session.tree.completions) == 3
    await post(proxy, session, retry(1), temperature=0.1)
    assert len(session.tree.completions) == 4


async def test_ending_the_session_ends_joined_calls(proxy, session, engine):
    engine.hold = asyncio.Event()
    calls = [asyncio.create_task(post(proxy, session, retry(count))) for count in (0, 1, 2)]
    await _calls(session, 3)
    await proxy.end_session(session)
    assert {answer.status_code for answer in await settled(calls)} == {410}
    assert engine.in_flight == 0


async def _calls(session, count):
    """Wait until so many calls are being answered."""
    await _until(lambda: len(session.calls) == count)


async def _until(happened):
    """In this process everything happens within a few turns of the loop."""
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0)
    raise TimeoutError
