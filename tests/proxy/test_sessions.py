import pytest

from areal.config.errors import ConfigError
from areal.proxy import NO_SESSION_KEY, ProxyLimits
from areal.proxy.sessions import SessionLimitReached

BODY = {"model": "any", "messages": [{"role": "user", "content": "Sort 5291"}]}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def api_key(key):
    return {"x-api-key": key}


async def post(proxy, path, headers):
    return await proxy.http_client.post(f"{proxy.origin}{path}/chat/completions", json=BODY, headers=headers)


@pytest.mark.parametrize("header", [bearer, api_key])
@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_key_alone_names_the_session(proxy, session, header, prefix):
    response = await post(proxy, prefix, header(session.api_key))
    assert response.status_code == 200
    assert session.tree.last.id == response.json()["id"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("headers", [{}, bearer("DUMMY"), api_key("DUMMY"), bearer(NO_SESSION_KEY)])
async def test_path_alone_names_the_session_whatever_foreign_key_comes_with_it(proxy, session, headers, prefix):
    response = await post(proxy, f"/s/{session.token}{prefix}", headers)
    assert response.status_code == 200
    assert session.tree.last.id == response.json()["id"]


async def test_path_and_key_of_two_sessions_are_refused(proxy, session):
    other = proxy.open_session()
    response = await post(proxy, f"/s/{session.token}/v1", bearer(other.api_key))
    assert response.status_code == 401
    assert session.tree.last is None
    assert other.tree.last is None


async def test_two_keys_of_two_sessions_are_refused(proxy, session):
    other = proxy.open_session()
    response = await post(proxy, "/v1", bearer(other.api_key) | api_key(session.api_key))
    assert response.status_code == 401


@pytest.mark.parametrize("headers", [{}, bearer("unknown"), api_key(""), {"authorization": "Basic eDp5"}])
async def test_request_without_a_known_key_is_refused(proxy, session, headers):
    response = await post(proxy, "/v1", headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


async def test_key_of_a_client_made_without_a_session_gets_the_remedy(proxy):
    response = await post(proxy, "/v1", bearer(NO_SESSION_KEY))
    assert response.status_code == 401
    message = response.json()["error"]["message"]
    assert "extra_kwargs" in message
    assert "workflow_context.get()" in message


async def test_unknown_path_is_refused_even_with_a_good_key(proxy, session):
    assert (await post(proxy, "/s/guess/v1", bearer(session.api_key))).status_code == 401


async def test_ended_session_answers_410_by_path_and_by_key(proxy, session):
    await proxy.end_session(session)
    assert (await post(proxy, f"/s/{session.token}/v1", {})).status_code == 410
    assert (await post(proxy, "/v1", bearer(session.api_key))).status_code == 410
    assert (await post(proxy, "/v1", api_key(session.api_key))).status_code == 410
    assert len(proxy) == 0


async def test_key_of_an_ended_session_opens_no_other(proxy, session):
    other = proxy.open_session()
    await proxy.end_session(session)
    assert (await post(proxy, f"/s/{other.token}/v1", bearer(session.api_key))).status_code == 401


async def test_memory_of_ended_sessions_is_bounded(start_proxy):
    proxy = await start_proxy(ProxyLimits(remembered_ended_sessions=1))
    first, second = proxy.open_session(), proxy.open_session()
    await proxy.end_session(first)
    await proxy.end_session(second)
    assert (await post(proxy, "/v1", bearer(first.api_key))).status_code == 401
    assert (await post(proxy, "/v1", bearer(second.api_key))).status_code == 410


async def test_ending_twice_is_harmless(proxy, session):
    await proxy.end_session(session)
    await proxy.end_session(session)
    assert len(proxy) == 0


async def test_sessions_are_capped(start_proxy):
    proxy = await start_proxy(ProxyLimits(max_sessions=2))
    first = proxy.open_session()
    proxy.open_session()
    with pytest.raises(SessionLimitReached, match="max_sessions"):
        proxy.open_session()
    await proxy.end_session(first)
    proxy.open_session()


async def test_one_session_sees_nothing_of_another(proxy, session):
    other = proxy.open_session()
    await post(proxy, "/v1", bearer(session.api_key))
    assert other.tree.last is None
    assert session.api_key != other.api_key
    assert session.base_url != other.base_url


async def test_models_needs_a_key_and_health_does_not(proxy, session):
    http = proxy.http_client
    assert (await http.get(f"{proxy.origin}/v1/models")).status_code == 401
    assert (await http.get(f"{session.base_url}/models")).json()["data"][0]["id"] == "default"
    assert (await http.get(f"{proxy.origin}/health")).json()["status"] == "ok"
    assert (await http.get(f"{proxy.origin}/v1/health")).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", "::"])
async def test_only_loopback_is_bound(proxy, host):
    with pytest.raises(ConfigError, match="loopback"):
        await proxy.start(host)


async def test_taken_port_is_a_clear_error(proxy):
    port = int(proxy.origin.rpartition(":")[2])
    with pytest.raises(ConfigError, match="free one"):
        await proxy.start(port=port)


async def test_session_needs_a_running_proxy(proxy):
    await proxy.aclose()
    with pytest.raises(RuntimeError, match="start"):
        proxy.open_session()
