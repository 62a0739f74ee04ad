import asyncio
import contextlib
import json

import openai
import pytest
from conversations import ADD, QUESTION, ask, post

from areal.api.errors import ContextLengthError, EngineError, GrammarError, RequestError
from areal.proxy import ProxyLimits

WAIT_SECONDS = 10


async def test_client_that_is_cancelled_aborts_its_generation(client, session, engine):
    engine.hold = asyncio.Event()
    call = asyncio.create_task(ask(client))
    await engine.until_in_flight(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_connection_that_breaks_aborts_the_generation(proxy, session, engine):
    engine.hold = asyncio.Event()
    host, port = proxy.origin.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"messages": [QUESTION]}).encode()
    path = f"/s/{session.token}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await engine.until_in_flight(1)
    writer.close()
    await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_client_that_times_out_aborts_its_generation(client, session, engine):
    engine.hold = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        await ask(client, timeout=0.05)
    await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_ending_the_session_aborts_its_calls_with_410(client, proxy, session, engine):
    engine.hold = asyncio.Event()
    calls = [asyncio.create_task(ask(client)) for _ in range(2)]
    await engine.until_in_flight(2)
    await proxy.end_session(session)
    assert engine.in_flight == 0
    for call in calls:
        with pytest.raises(openai.APIStatusError) as error:
            await call
        assert error.value.status_code == 410
    assert session.tree.completions == []


async def test_one_abandoned_choice_abandons_all(client, session, engine):
    engine.hold = asyncio.Event()
    call = asyncio.create_task(ask(client, n=3))
    await engine.until_in_flight(3)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_call_beyond_the_cap_has_to_wait(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(max_calls_per_session=1))
    session = proxy.open_session()
    engine.hold = asyncio.Event()
    first = asyncio.create_task(post(proxy, session))
    await engine.until_in_flight(1)
    refused = await post(proxy, session)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    engine.hold.set()
    assert (await first).status_code == 200
    assert (await post(proxy, session)).status_code == 200


async def test_body_beyond_the_cap_is_refused(start_proxy):
    proxy = await start_proxy(ProxyLimits(max_body_bytes=1000))
    session = proxy.open_session()
    response = await post(proxy, session, messages=[{"role": "user", "content": "x" * 1000}])
    assert response.status_code == 413


async def test_body_that_never_comes_is_given_up(start_proxy):
    proxy = await start_proxy(ProxyLimits(body_timeout_seconds=0.05))
    session = proxy.open_session()
    host, port = proxy.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    path = f"/s/{session.token}/chat/completions"
    writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_SECONDS):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_engine_that_never_answers_is_given_up(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(call_timeout_seconds=0.05))
    engine.hold = asyncio.Event()
    response = await post(proxy, proxy.open_session())
    assert response.status_code == 503
    assert engine.in_flight == 0


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineError("it died"), 503, "engine_unavailable"),
        (RequestError("not like this"), 400, None),
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (ZeroDivisionError("ours"), 500, None),
    ],
)
async def test_engines_failures_have_their_status(client, session, engine, failure, status, code):
    engine.failure = failure
    with pytest.raises(openai.APIStatusError) as error:
        await ask(client)
    assert error.value.status_code == status
    assert error.value.code == code
    assert session.tree.completions == []


async def test_grammar_that_fails_is_the_fault_of_the_parameter_that_asked_for_it(proxy, session, engine):
    engine.failure = GrammarError("no token of this model continues the answer")
    json_object = {"type": "json_object"}
    for parameters, name in (({"response_format": json_object}, "response_format"), ({"tools": [ADD]}, "tools")):
        answer = await post(proxy, session, **parameters)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    answer = await post(proxy, session, route="responses", text={"format": json_object})
    assert answer.json()["error"]["param"] == "text.format"


async def test_internal_failure_tells_the_client_nothing(proxy, session, engine):
    engine.failure = ZeroDivisionError("secret path")
    response = await post(proxy, session)
    assert "secret" not in response.text


async def test_engine_that_answers_nothing_is_at_fault(proxy, session, engine):
    engine.answer = []
    assert (await post(proxy, session)).status_code == 503


async def test_sick_engine_shows_in_health(proxy, engine):
    await engine.aclose()
    assert (await proxy.http_client.get(f"{proxy.origin}/health")).status_code == 503


async def test_prompt_that_does_not_fit_is_too_long(client, engine):
    with pytest.raises(openai.BadRequestError) as error:
        await ask(client, [{"role": "user", "content": "9" * 600}])
    assert error.value.code == "context_length_exceeded"
    assert engine.requests == []


async def test_answer_asked_for_beyond_the_context_is_too_long(client):
    with pytest.raises(openai.BadRequestError) as error:
        await ask(client, max_tokens=600)
    assert error.value.code == "context_length_exceeded"


async def test_answer_not_asked_for_is_clipped_to_the_context(client, engine):
    await ask(client, [{"role": "user", "content": "9" * 480}])
    (request,) = engine.requests
    assert len(request.input_ids) + request.gconfig.max_new_tokens == 512


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("top_logprobs", 3),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 1),
        ("logit_bias", {"5": 1}),
        ("reasoning_effort", "high"),
        ("functions", [5]),
        ("unheard_of", 1),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 1000),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", 5),
        ("logprobs", "yes"),
        ("model", 5),
        ("tools", [{"type": "web_search"}]),
        ("tools", "add"),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [5]),
        ("messages[0].role", [{"role": "robot", "content": "x"}]),
        ("messages[0].content", [{"role": "user", "content": None}]),
        ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages[0].tool_calls[0]", [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(proxy, session, engine, name, value):
    response = await post(proxy, session, **{name.partition("[")[0]: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert name.partition("[")[0] in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 5000])
async def test_body_that_is_no_json_object_is_refused(proxy, session, raw):
    response = await proxy.http_client.post(f"{session.base_url}/chat/completions", content=raw)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
async def test_wrong_route_or_method_has_an_error_body(proxy, method, path, status):
    response = await proxy.http_client.request(method, proxy.origin + path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_tool_call_arguments_that_are_no_json_are_kept_as_text(client, engine):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud800"'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    await ask(client, [QUESTION, turn, {"role": "tool", "tool_call_id": "c", "content": "?"}])
    assert '{"a": "\\ud800"' in engine.tokenizer.decode(engine.requests[0].input_ids)


async def test_the_end_of_its_session_ends_a_call_and_not_the_task_that_made_it(proxy, session, engine):
    engine.hold = asyncio.Event()
    reached = []

    async def agent():
        reached.append((await post(proxy, session)).status_code)
        await asyncio.sleep(0)  # a task that was cancelled would not come back from here
        reached.append("on")

    task = asyncio.ensure_future(agent())
    await engine.until_in_flight(1)
    await proxy.end_session(session)
    await asyncio.wait_for(task, WAIT_SECONDS)
    assert reached == [410, "on"]
    assert engine.in_flight == 0
    assert not session.calls


async def test_the_end_of_its_session_reaches_a_task_that_was_cancelled_before_and_went_on(proxy, session, engine):
    engine.hold = asyncio.Event()
    begun = asyncio.Event()

    async def agent():
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return (await post(proxy, session)).status_code

    task = asyncio.ensure_future(agent())
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    task.cancel()
    await engine.until_in_flight(1)
    await proxy.end_session(session)
    assert await asyncio.wait_for(task, WAIT_SECONDS) == 410
