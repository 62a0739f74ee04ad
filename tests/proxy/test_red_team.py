"""Attacks: nothing passes, nothing crashes, and afterwards the proxy serves as before with nothing left running."""

import asyncio
import contextlib
import json
import secrets

import pytest
from conversations import BODIES, QUESTION
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.proxy import ProxyLimits

pytestmark = pytest.mark.slow

WAIT_SECONDS = 10


@pytest.fixture(autouse=True)
async def unharmed(proxy, engine):
    """What holds after every attack."""
    yield
    await engine.until_in_flight(0)
    assert all(not session.calls for session in proxy._sessions)
    fresh = proxy.open_session()
    for route, body in BODIES.items():
        answer = await proxy.http_client.post(f"{fresh.base_url}/{route}", json=body)
        assert answer.status_code == 200
    await proxy.end_session(fresh)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def post(proxy, url, headers=None, **options):
    return await proxy.http_client.post(url, headers=headers or {}, **options)


async def test_answers_of_another_session_cannot_be_read_or_continued(proxy, session, engine):
    other = proxy.open_session()
    secret = {"input": "my secret is 5291"}
    named = (await post(proxy, f"{other.base_url}/responses", json=secret)).json()["id"]
    stolen = await post(proxy, f"{session.base_url}/responses", json={"input": "?", "previous_response_id": named})
    assert stolen.status_code == 400
    assert len(engine.requests) == 1
    for path in (f"responses/{named}", f"chat/completions/{named}", f"messages/{named}"):
        got = await proxy.http_client.get(f"{session.base_url}/{path}")
        assert got.status_code == 404
        assert "secret" not in got.text


async def test_answer_of_another_session_cannot_be_rewarded(start_proxy):
    proxy = await start_proxy(self_reward=True)
    admin = bearer(proxy.admin_key)
    mine, other = [(await post(proxy, f"{proxy.origin}/sessions", admin)).json() for _ in range(2)]
    named = (await post(proxy, f"{other['base_url']}/responses", json=BODIES["responses"])).json()["id"]
    await post(proxy, f"{mine['base_url']}/responses", json=BODIES["responses"])
    url = f"{proxy.origin}/sessions/{mine['session_id']}/reward"
    assert (await post(proxy, url, bearer(mine["api_key"]), json={"reward": {named: 9}})).status_code == 400
    assert proxy.online.find(other["session_id"]).session.tree.last.reward is None


@pytest.mark.parametrize("verb", ["reward", "end"])
async def test_session_cannot_reward_itself(proxy, verb):
    mine = (await post(proxy, f"{proxy.origin}/sessions", bearer(proxy.admin_key))).json()
    await post(proxy, f"{mine['base_url']}/responses", json=BODIES["responses"])
    paths = ["", "/v1", f"/s/{proxy.online.find(mine['session_id']).session.token}", mine["base_url"]]
    for path in paths:
        origin = path if path.startswith("http") else proxy.origin + path
        url = f"{origin}/sessions/{mine['session_id']}/{verb}"
        for headers in ({}, bearer(mine["api_key"]), {"x-api-key": mine["api_key"]}, bearer("guess")):
            assert (await post(proxy, url, headers, json={"reward": 9})).status_code in (401, 403, 404)
    online = proxy.online.find(mine["session_id"])
    assert online.session.tree.last.reward is None
    assert not online.session.ended


async def test_key_of_an_ended_session_cannot_be_replayed(proxy, session, engine):
    await post(proxy, f"{session.base_url}/responses", json=BODIES["responses"])
    await proxy.end_session(session)
    nodes = len(session.tree.completions)
    for route, body in BODIES.items():
        assert (await post(proxy, f"{session.base_url}/{route}", json=body)).status_code == 410
        assert (await post(proxy, f"{proxy.origin}/{route}", bearer(session.api_key), json=body)).status_code == 410
    for retry in ({"x-stainless-retry-count": "1"}, {"idempotency-key": "x"}):
        answer = await post(proxy, f"{session.base_url}/responses", retry, json=BODIES["responses"])
        assert answer.status_code == 410, "not even what was recorded"
    assert len(session.tree.completions) == nodes == len(engine.requests)


async def test_admin_key_calls_no_model(proxy, engine):
    for route, body in BODIES.items():
        answer = await post(proxy, f"{proxy.origin}/v1/{route}", bearer(proxy.admin_key), json=body)
        assert answer.status_code == 401
    assert engine.requests == []


async def test_guesses_open_nothing(proxy, session, engine):
    near = [session.api_key[:-1], session.api_key + "0", session.api_key.upper(), session.token, proxy.admin_key[:-1]]
    guesses = [*near, "", " ", "null", "*", "sk-areal-", "../" * 5, "x" * 4000, secrets.token_hex(24)]
    guesses.remove(session.token)  # it is a credential of the same session, wherever it is put
    for guess in guesses:
        for headers in (bearer(guess), {"x-api-key": guess}):
            answer = await post(proxy, f"{proxy.origin}/v1/responses", headers, json=BODIES["responses"])
            assert answer.status_code == 401
            assert (await post(proxy, f"{proxy.origin}/sessions", headers)).status_code in (401, 403)
    assert engine.requests == []


async def test_refusals_do_not_repeat_the_credential(proxy, session):
    for answer in (
        await post(proxy, f"{proxy.origin}/v1/responses", bearer("sk-a-secret"), json={}),
        await post(proxy, f"{proxy.origin}/s/sk-a-secret/v1/responses", json={}),
        await post(proxy, f"{proxy.origin}/sessions", bearer("sk-a-secret")),
    ):
        assert answer.status_code == 401
        assert "sk-a-secret" not in answer.text
        assert session.api_key not in answer.text


@pytest.mark.parametrize("route", BODIES)
async def test_oversize_body_is_refused_while_it_comes(start_proxy, engine, route):
    proxy = await start_proxy(ProxyLimits(max_body_bytes=10_000))
    session = proxy.open_session()

    answer = await post(proxy, f"{session.base_url}/{route}", content=b" " * 20_000)
    assert answer.status_code == 413
    async with asyncio.timeout(WAIT_SECONDS):
        head = f"POST /s/{session.token}/v1/{route} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        said = await raw(proxy, head.encode() + b"2710\r\n" + b" " * 10_000 + b"\r\n2710\r\n" + b" " * 10_000)
    assert b" 413 " in said.splitlines()[0]
    assert engine.requests == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "model", "messages", "input", "system", "instructions", "tools", "tool_choice", "parallel_tool_calls",
        "response_format", "text", "output_config", "n", "max_tokens", "max_completion_tokens", "max_output_tokens",
        "temperature", "top_p", "top_k", "stop", "stop_sequences", "seed", "logprobs", "top_logprobs", "stream",
        "stream_options", "thinking", "reasoning", "include", "metadata", "previous_response_id", "store", "user",
    ]
)  # fmt: skip
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "name", "id", "call_id", "tool_calls", "tool_call_id", "function", "arguments",
     "parameters", "input_schema", "schema", "json_schema", "strict", "output", "summary", "tool_use_id", "thinking"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "function", "text", "input_text", "output_text", "tool_use", "tool_result",
     "function_call", "function_call_output", "reasoning", "message", "object", "array", "string", "json_schema",
     "auto", "required", "add", "{}", '{"a": 1}', "\ud83d", "\x00", "<tool_call>", "<|im_end|>", "1e999"]
)  # fmt: skip
SHAPED = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)
"""What looks like a request from afar."""
HARD = settings(
    max_examples=120,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("route", BODIES)
@HARD
@given(name=FIELDS, value=JSON | SHAPED)
async def test_no_value_of_any_field_is_a_fault_of_ours(proxy, session, route, name, value):
    raw_body = json.dumps(BODIES[route] | {name: value}).encode()
    answer = await post(proxy, f"{session.base_url}/{route}", content=raw_body)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("route", BODIES)
@HARD
@given(items=st.lists(st.dictionaries(KEYS, SHAPED, max_size=6), max_size=4))
async def test_no_conversation_is_a_fault_of_ours(proxy, session, route, items):
    name = "input" if route == "responses" else "messages"
    raw_body = json.dumps(BODIES[route] | {name: items}).encode()
    answer = await post(proxy, f"{session.base_url}/{route}", content=raw_body)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("route", [*BODIES, "sessions"])
@HARD
@given(body=st.binary(max_size=64) | st.text(max_size=32).map(str.encode) | JSON.map(lambda v: json.dumps(v).encode()))
async def test_no_bytes_are_a_fault_of_ours(proxy, session, route, body):
    managing = route == "sessions"
    url = f"{proxy.origin}/sessions" if managing else f"{session.base_url}/{route}"
    answer = await post(proxy, url, bearer(proxy.admin_key) if managing else {}, content=body)
    assert answer.status_code in ((201, 400) if managing else (400,)), answer.text


def nested(depth, closed=True):
    return b'{"a":' * depth + b"1" + (b"}" * depth if closed else b"")


@pytest.mark.parametrize("depth", [120, 1000, 100_000])
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("place", ["messages", "input", "tools", "metadata", "response_format", "tool_choice", "stop"])
async def test_nesting_without_end_is_refused(proxy, session, route, place, depth):
    plain = json.dumps(BODIES[route])[:-1].encode()
    deep = plain + b', "' + place.encode() + b'": [' + nested(depth) + b"]}"
    answer = await post(proxy, f"{session.base_url}/{route}", content=deep)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("depth", [100, 500, 900])
async def test_deep_schemas_and_arguments_are_refused_or_honoured(proxy, session, depth):
    inner = nested(depth).decode()
    schema = '{"type": "object", "properties": ' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "add", "parameters": {inner}}}}}'
    deep_tool = f'{{"type": "function", "function": {{"name": "add", "parameters": {schema}}}}}'
    arguments = json.dumps(inner)
    call = f'{{"id": "c", "type": "function", "function": {{"name": "add", "arguments": {arguments}}}}}'
    turn = f'{{"role": "assistant", "content": null, "tool_calls": [{call}]}}'
    question = json.dumps(QUESTION)
    bodies = [
        f'{{"messages": [{question}], "tools": [{tool}]}}',
        f'{{"messages": [{question}], "tools": [{deep_tool}], "tool_choice": "required"}}',
        f'{{"messages": [{question}, {turn}, {question}]}}',
        f'{{"messages": [{question}], "response_format": '
        f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}}}',
    ]
    for body in bodies:
        answer = await post(proxy, f"{session.base_url}/chat/completions", content=body.encode())
        assert answer.status_code in (200, 400, 503), answer.text


async def raw(proxy, sent, end=False):
    """What comes back, up to the end of the connection or a while of silence."""
    host, port = proxy.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        if end:
            writer.write_eof()
        return await _until_silent(reader)
    finally:
        writer.close()


async def _until_silent(reader):
    said = b""
    while True:
        try:
            async with asyncio.timeout(0.3 if said else 3):
                chunk = await reader.read(65536)
        except (TimeoutError, ConnectionError):
            return said
        if not chunk:
            return said
        said += chunk


def statuses(said):
    return [int(line.split()[1]) for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.")]


BODY = json.dumps(BODIES["chat/completions"]).encode()
SIZE = len(BODY)
SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "headers",
    [
        f"content-length: {SIZE}\r\ncontent-length: {SIZE + 50}",
        f"content-length: {SIZE}, {SIZE + 1}",
        "content-length: -1",
        "content-length: +5",
        "content-length: 0x10",
        "content-length: 99999999999999999999999999",
        "content-length: ",
        f"content-length : {SIZE}",
        "transfer-encoding: chunked, identity",
        "transfer-encoding: xchunked",
        "transfer-encoding: gzip, chunked",
        f"content-length: {SIZE}\r\nx: a\x00b",
        f"content-length: {SIZE}\r\nx: a\rb",
        f"content-length: {SIZE}\r\nhost: evil",
        f"content-length: {SIZE}\r\n: empty",
        f"content-length: {SIZE}\r\nno colon",
    ],
)
async def test_ambiguous_heads_are_refused(proxy, session, engine, headers):
    head = f"POST /s/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n"
    said = await raw(proxy, head.encode("latin-1") + BODY + SMUGGLED)
    assert statuses(said) == [400], said
    assert engine.requests == []


async def test_header_that_continues_the_one_before_it_is_part_of_that(proxy, session, engine):
    """Here of the Host, which is a foreign one then; the body has no length and is not read as a second request."""
    head = f"POST /s/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n content-length: {SIZE}\r\n\r\n"
    said = await raw(proxy, head.encode() + BODY + SMUGGLED)
    assert statuses(said)[0] == 421, said
    assert set(statuses(said)) <= {421, 400}, said
    assert engine.requests == []


@pytest.mark.parametrize(
    "headers", [f"content-length: {SIZE}\r\ntransfer-encoding: chunked", "transfer-encoding: chunked\r\nx: y"]
)
async def test_request_within_a_body_needs_its_own_key(proxy, session, engine, headers):
    """Whichever length counts, what follows the end of the first request has no credential."""
    head = f"POST /s/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode()
    chunked = f"{SIZE:x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    said = statuses(await raw(proxy, head + chunked + SMUGGLED))
    assert said.count(200) <= 1
    assert set(said) <= {200, 400, 401}
    assert len(engine.requests) <= 1


async def test_duplicate_credentials_of_two_sessions_are_refused(proxy, session, engine):
    other = proxy.open_session()
    for first, second in ((session, other), (other, session)):
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {first.api_key}\r\n"
            f"authorization: Bearer {second.api_key}\r\ncontent-length: {SIZE}\r\n\r\n"
        )
        assert statuses(await raw(proxy, head.encode() + BODY)) == [401]
    assert engine.requests == []
    await proxy.end_session(other)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "OPTIONS", "BREW", "post"])
async def test_other_methods_are_refused(proxy, session, engine, method):
    path = f"/s/{session.token}/v1/chat/completions"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {SIZE}\r\n\r\n"
    assert all(status in (400, 404, 405, 501) for status in statuses(await raw(proxy, head.encode() + BODY)))
    assert engine.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions/..",
        "/v1/../v1/chat/completions",
        "/s/../v1/chat/completions",
        "/s/%2e%2e/v1/chat/completions",
        "/s//v1/chat/completions",
        "/s/%00/v1/chat/completions",
        "/s/{token}%00/v1/chat/completions",
        "/s/{token}%20/v1/chat/completions",
        "/s/{token};x/v1/chat/completions",
        "/s/{token}/../{token}/v1/chat/completions",
        "/s/*/v1/chat/completions",
        "/s/{token}/v1/chat/completions%00",
        "/s/{token}/v1/chat/completions%0d%0ax",
        "/v1/chat/completions?token={token}",
        "/v1/chat/completions#/s/{token}",
        "/V1/CHAT/COMPLETIONS",
        "/sessions/",
        "/sessions/..",
        "/sessions/%2e%2e/sessions",
        "/health/../sessions",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/.env",
        "/etc/passwd",
        "/%ff%fe",
        "*",
        "",
        "/" + "a" * 10_000,
    ],
)
async def test_paths_lead_nowhere_else(proxy, session, engine, path):
    path = path.replace("{token}", session.token)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {SIZE}\r\n\r\n"
    assert all(status in (400, 401, 404, 405, 414, 431) for status in statuses(await raw(proxy, head.encode() + BODY)))
    assert engine.requests == []
    assert len(proxy) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 300_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_junk_is_no_fault_of_ours(proxy, engine, sent):
    assert 500 not in statuses(await raw(proxy, sent, end=True))
    assert engine.requests == []


async def test_many_slow_connections_are_given_up(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(body_timeout_seconds=0.2))
    session = proxy.open_session()
    host, port = proxy.origin.removeprefix("http://").split(":")
    head = f"POST /s/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
    beginnings = [b"", b"P", head.encode(), head.encode() + b"\r\n", head.encode() + b"\r\n{"]
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
    for number, (_, writer) in enumerate(slow):
        writer.write(beginnings[number % len(beginnings)])
    answer = await post(proxy, f"{session.base_url}/chat/completions", json=BODIES["chat/completions"])
    assert answer.status_code == 200, "the others are served meanwhile"
    async with asyncio.timeout(WAIT_SECONDS):
        ends = await asyncio.gather(*(reader.read() for reader, _ in slow), return_exceptions=True)
    for end in ends:
        assert isinstance(end, ConnectionError) or not end or b" 408 " in end.splitlines()[0]
    for _, writer in slow:
        writer.close()
    assert not session.calls


async def test_trickling_head_does_not_buy_time(start_proxy):
    proxy = await start_proxy(ProxyLimits(body_timeout_seconds=0.3))
    host, port = proxy.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def trickle():
        for byte in b"GET /health HTTP/1.1\r\nx: " + b"y" * 10_000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(WAIT_SECONDS):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    trickling.cancel()
    await asyncio.wait((trickling,))
    writer.close()


async def test_kept_connection_may_rest_between_requests(start_proxy):
    proxy = await start_proxy(ProxyLimits(body_timeout_seconds=0.1))
    host, port = proxy.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(WAIT_SECONDS):
            assert b" 200 " in await reader.readline()
            while b"ok" not in await reader.read(65536):
                pass
        rested = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, rested.set)
        await rested.wait()
    writer.close()


@pytest.mark.parametrize("key", ["k\x00", "'; drop table", "x" * 5000, "é"])
async def test_idempotency_keys_are_only_names(proxy, session, key):
    headers = [(b"idempotency-key", key.encode())]
    url = f"{session.base_url}/chat/completions"
    answers = [await proxy.http_client.post(url, content=BODY, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(session.tree.completions) == 1
