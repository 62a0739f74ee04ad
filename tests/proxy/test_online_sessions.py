import asyncio
import json

import httpx
import pytest
from conversations import QUESTION

from areal.api.errors import EpisodeTimeout, RewardTimeout
from areal.config.rollout import GenerationHyperparameters
from areal.proxy import Proxy, ProxyLimits

WAIT_SECONDS = 10


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def open_session(proxy, key=None, extra=None, **options):
    headers = bearer(key or proxy.admin_key) | (extra or {})
    return await proxy.http_client.post(f"{proxy.origin}/sessions", headers=headers, **options)


async def manage(proxy, session_id, verb, body=None, key=None):
    url = f"{proxy.origin}/sessions/{session_id}/{verb}"
    return await proxy.http_client.post(url, json=body, headers=bearer(key or proxy.admin_key))


async def call_model(proxy, opened):
    url = f"{opened['base_url']}/chat/completions"
    answer = await proxy.http_client.post(url, json={"messages": [QUESTION]}, headers=bearer(opened["api_key"]))
    assert answer.status_code == 200
    return answer.json()["id"]


def online_session(proxy, opened):
    return proxy.online.find(opened["session_id"])


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_life_of_an_online_session_is_three_calls(proxy, prefix):
    opened = await proxy.http_client.post(f"{proxy.origin}{prefix}/sessions", headers=bearer(proxy.admin_key))
    assert opened.status_code == 201
    opened = opened.json()
    online = online_session(proxy, opened)
    answer = await call_model(proxy, opened)
    rewarded = await manage(proxy, opened["session_id"], "reward", {"reward": 0.5})
    assert rewarded.json() == {
        "session_id": opened["session_id"],
        "ended": False,
        "rewarded": True,
        "completions": [answer],
    }
    assert (await manage(proxy, opened["session_id"], "end")).json()["ended"] is True
    assert await online.outcome is True
    assert online.session.tree.last.reward == 0.5
    assert len(proxy) == len(proxy.online) == 0


async def test_reward_may_come_after_the_end(proxy):
    opened = (await open_session(proxy)).json()
    online, answer = online_session(proxy, opened), await call_model(proxy, opened)
    await manage(proxy, opened["session_id"], "end")
    assert not online.outcome.done()
    assert (await manage(proxy, opened["session_id"], "reward", {"reward": {answer: 1}})).status_code == 200
    assert await online.outcome is True
    assert online.session.tree.last.reward == 1.0


async def test_delete_ends_a_session(proxy):
    opened = (await open_session(proxy)).json()
    url = f"{proxy.origin}/sessions/{opened['session_id']}"
    assert (await proxy.http_client.delete(url, headers=bearer(proxy.admin_key))).status_code == 200
    assert len(proxy) == 0
    assert (await proxy.http_client.delete(url, headers=bearer(proxy.admin_key))).status_code == 200


async def test_reward_of_null_rejects_the_session(proxy):
    opened = (await open_session(proxy)).json()
    online = online_session(proxy, opened)
    await manage(proxy, opened["session_id"], "reward", {"reward": None})
    await manage(proxy, opened["session_id"], "end")
    assert await online.outcome is False


async def test_complete_session_takes_no_more_rewards(proxy):
    opened = (await open_session(proxy)).json()
    await call_model(proxy, opened)
    await manage(proxy, opened["session_id"], "end")
    assert (await manage(proxy, opened["session_id"], "reward", {"reward": 1})).status_code == 200
    assert (await manage(proxy, opened["session_id"], "reward", {"reward": 2})).status_code == 409


async def test_reward_that_comes_too_late_is_refused(start_proxy):
    proxy = await start_proxy(ProxyLimits(reward_timeout_seconds=0.05))
    opened = (await open_session(proxy)).json()
    online = online_session(proxy, opened)
    await call_model(proxy, opened)
    await manage(proxy, opened["session_id"], "end")
    with pytest.raises(RewardTimeout):
        async with asyncio.timeout(WAIT_SECONDS):
            await online.outcome
    assert (await manage(proxy, opened["session_id"], "reward", {"reward": 1})).status_code == 409
    assert len(proxy.online) == 0


async def test_session_that_is_never_ended_is_ended_for_its_agent(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(session_timeout_seconds=0.05))
    engine.hold = asyncio.Event()
    opened = (await open_session(proxy)).json()
    online = online_session(proxy, opened)
    url = f"{opened['base_url']}/chat/completions"
    answer = await proxy.http_client.post(url, json={"messages": [QUESTION]})
    assert answer.status_code == 410
    with pytest.raises(EpisodeTimeout):
        await online.outcome
    assert engine.in_flight == 0
    assert len(proxy) == len(proxy.online) == 0


@pytest.mark.parametrize(
    "reward", ["1", [], {}, {"chatcmpl-unknown": 1}, {"chatcmpl-unknown": "x"}, [1], {"a": None}, "NaN"]
)
async def test_reward_that_means_nothing_is_refused(proxy, reward):
    opened = (await open_session(proxy)).json()
    await call_model(proxy, opened)
    answer = await manage(proxy, opened["session_id"], "reward", {"reward": reward})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reward"
    assert online_session(proxy, opened).session.tree.last.reward is None


@pytest.mark.parametrize("raw", ["", "[]", '{"reward": NaN}', '{"reward": 1e999}', "{}", '{"reward": 1, "to": 2}'])
async def test_reward_must_be_json_and_finite(proxy, raw):
    opened = (await open_session(proxy)).json()
    await call_model(proxy, opened)
    url = f"{proxy.origin}/sessions/{opened['session_id']}/reward"
    answer = await proxy.http_client.post(url, content=raw, headers=bearer(proxy.admin_key))
    assert answer.status_code == 400


@pytest.mark.parametrize("reward", [1e308, -1e308, 3.5e38, {"last": 1e308}])
@pytest.mark.parametrize("own_key", [False, True], ids=["admin key", "own key"])
async def test_reward_must_be_finite_in_float32(start_proxy, reward, own_key):
    proxy = await start_proxy(self_reward=True)
    opened = (await open_session(proxy)).json()
    answer = await call_model(proxy, opened)
    given = {answer: reward["last"]} if isinstance(reward, dict) else reward
    key = opened["api_key"] if own_key else None
    refused = await manage(proxy, opened["session_id"], "reward", {"reward": given}, key)
    assert refused.status_code == 400
    assert "a reward must be at most 3.4e+38 in size (float32)" in refused.json()["error"]["message"]
    assert "scale rewards down" in refused.json()["error"]["message"]
    online = online_session(proxy, opened)
    assert online.session.tree.last.reward is None
    assert not online.rewarded


async def test_rewards_of_a_session_must_add_up_in_float32(proxy):
    opened = (await open_session(proxy)).json()
    answers = [await call_model(proxy, opened) for _ in range(2)]
    refused = await manage(proxy, opened["session_id"], "reward", {"reward": dict.fromkeys(answers, 3e38)})
    assert refused.status_code == 400
    assert "must add up" in refused.json()["error"]["message"]


async def test_reward_before_any_answer_is_a_conflict(proxy):
    opened = (await open_session(proxy)).json()
    answer = await manage(proxy, opened["session_id"], "reward", {"reward": 1})
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "no_interactions"


async def test_session_takes_no_settings(proxy):
    assert (await open_session(proxy, content=b"{}")).status_code == 201
    assert (await open_session(proxy, json={"gconfig": {}})).status_code == 400


async def test_sessions_are_capped_over_http_too(start_proxy):
    proxy = await start_proxy(ProxyLimits(max_sessions=2))
    one = (await open_session(proxy)).json()
    proxy.open_session()
    refused = await open_session(proxy)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    await manage(proxy, one["session_id"], "end")
    assert (await open_session(proxy)).status_code == 201


async def test_admin_key_is_made_for_each_proxy(start_proxy):
    one, two = await start_proxy(), await start_proxy()
    assert one.admin_key != two.admin_key
    assert (await open_session(one, two.admin_key)).status_code == 401


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]", "evil.example"])
async def test_base_url_is_the_address_that_was_reached_whatever_host_says(proxy, host):
    opened = await open_session(proxy, extra={"host": host})
    assert opened.json()["base_url"].startswith(f"{proxy.origin}/s/")


async def test_base_url_is_that_of_the_connection_where_every_address_is_bound(engine):
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    proxy = Proxy(engine, engine.tokenizer, gconfig=gconfig, max_positions=512, admin_key="chosen")
    await proxy.start("0.0.0.0", exposed=True)
    port = proxy.origin.rpartition(":")[2]
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {**bearer("chosen"), "host": "evil.example"}
            opened = await client.post(f"http://127.0.0.1:{port}/sessions", headers=headers)
        assert opened.json()["base_url"].startswith(f"http://127.0.0.1:{port}/s/")
    finally:
        await proxy.aclose()


async def test_base_url_is_below_the_public_url_if_there_is_one(start_proxy):
    proxy = await start_proxy(public_url="https://agents.example/areal/")
    session = (await open_session(proxy, extra={"host": "evil.example"})).json()
    token = online_session(proxy, session).session.token
    assert session["base_url"] == f"https://agents.example/areal/s/{token}/v1"


@pytest.mark.parametrize("path", ["/health", "/sessions", "/s/TOKEN/v1/chat/completions"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1.evil.example", "", "[", "0x7f.1"])
async def test_request_for_another_host_is_refused_on_loopback(proxy, session, engine, path, host):
    url = proxy.origin + path.replace("TOKEN", session.token)
    headers = {**bearer(proxy.admin_key), "host": host.replace("PORT", proxy.origin.rpartition(":")[2])}
    async with httpx.AsyncClient(trust_env=False) as client:
        refused = await client.post(url, json={"messages": [QUESTION]}, headers=headers)
    assert refused.status_code == 421
    assert "127.0.0.1, localhost or [::1]" in refused.json()["error"]["message"]
    assert engine.requests == []
    assert len(proxy) == 1


@pytest.mark.parametrize(
    "host", ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST", "[::1]:PORT", "127.0.0.1:9", "127.1.2.3"]
)
async def test_request_for_this_machine_is_served_on_loopback(proxy, host):
    headers = {"host": host.replace("PORT", proxy.origin.rpartition(":")[2])}
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{proxy.origin}/health", headers=headers)).status_code == 200


async def test_two_hosts_are_refused_if_one_is_foreign(proxy):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.origin.rpartition(":")[2]))
    writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n")
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await reader.readline()).split()[1] in (b"400", b"421")
    writer.close()


async def test_host_of_the_public_url_is_served_on_loopback(start_proxy):
    proxy = await start_proxy(public_url="https://agents.example")
    async with httpx.AsyncClient(trust_env=False) as client:
        for host, status in (("agents.example", 200), ("agents.example:443", 200), ("evil.example", 421)):
            assert (await client.get(f"{proxy.origin}/health", headers={"host": host})).status_code == status


async def test_in_process_calls_may_have_any_host(proxy):
    assert (await proxy.http_client.get(f"{proxy.origin}/health", headers={"host": "any"})).status_code == 200


async def test_offer_brings_a_task_and_waits_for_the_reward(proxy):
    proxy.online.offers_only = True
    assert (await open_session(proxy)).status_code == 429
    waiting = asyncio.create_task(proxy.online.offer(proxy.open_session, {"messages": [QUESTION]}))
    await asyncio.sleep(0)
    opened = (await open_session(proxy)).json()
    assert opened["task"] == {"messages": [QUESTION]}
    await call_model(proxy, opened)
    await manage(proxy, opened["session_id"], "end")
    await manage(proxy, opened["session_id"], "reward", {"reward": 1})
    online = await waiting
    assert online.session.tree.reward == 1
    assert (await open_session(proxy)).status_code == 429


async def test_offer_that_is_withdrawn_is_not_handed_out(proxy, engine):
    proxy.online.offers_only = True
    gone = asyncio.create_task(proxy.online.offer(proxy.open_session, 1))
    stays = asyncio.create_task(proxy.online.offer(proxy.open_session, 2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait((gone,))
    opened = (await open_session(proxy)).json()
    assert opened["task"] == 2
    stays.cancel()
    await asyncio.wait((stays,))
    assert len(proxy) == len(proxy.online) == 0
    assert (await manage(proxy, opened["session_id"], "reward", {"reward": 1})).status_code == 409


@pytest.mark.parametrize("verb", ["reward", "end"])
async def test_own_key_manages_its_session_only_where_that_is_allowed(start_proxy, verb):
    for self_reward, status in ((False, 403), (True, 200)):
        proxy = await start_proxy(self_reward=self_reward)
        mine, other = (await open_session(proxy)).json(), (await open_session(proxy)).json()
        for opened in (mine, other):
            await call_model(proxy, opened)
        body = {"reward": 1} if verb == "reward" else None
        assert (await manage(proxy, mine["session_id"], verb, body, mine["api_key"])).status_code == status
        assert (await manage(proxy, other["session_id"], verb, body, mine["api_key"])).status_code == 403
        assert (await manage(proxy, "sess-none", verb, body, mine["api_key"])).status_code == 403
        assert (await open_session(proxy, mine["api_key"])).status_code == 403
        assert online_session(proxy, other).session.tree.last.reward is None


async def test_own_key_may_reward_after_the_end(start_proxy):
    proxy = await start_proxy(self_reward=True)
    opened = (await open_session(proxy)).json()
    online = online_session(proxy, opened)
    await call_model(proxy, opened)
    await manage(proxy, opened["session_id"], "end", key=opened["api_key"])
    late = await manage(proxy, opened["session_id"], "reward", {"reward": 1}, opened["api_key"])
    assert late.status_code == 200
    assert await online.outcome is True


async def test_tokens_of_a_session_are_capped(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(max_tokens_per_session=120))
    session, other = proxy.open_session(), proxy.open_session()
    url = f"{session.base_url}/chat/completions"
    body = {"messages": [QUESTION], "max_tokens": 8}
    taken, answer = 0, await proxy.http_client.post(url, json=body)
    while answer.status_code == 200 and len(engine.requests) < 50:
        taken += answer.json()["usage"]["total_tokens"]
        answer = await proxy.http_client.post(url, json=body)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "token_limit_exceeded"
    assert 0 < taken <= 120
    assert (await proxy.http_client.post(f"{other.base_url}/chat/completions", json=body)).status_code == 200


async def test_tokens_of_calls_that_came_to_nothing_are_given_back(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(max_tokens_per_session=60))
    session = proxy.open_session()
    url, body = f"{session.base_url}/chat/completions", {"messages": [QUESTION], "max_tokens": 8}
    engine.hold = asyncio.Event()
    for stream in (False, True, False, True):
        call = asyncio.create_task(proxy.http_client.post(url, json={**body, "stream": stream}))
        await engine.until_in_flight(1)
        call.cancel()
        await asyncio.wait((call,))
        await engine.until_in_flight(0)
    engine.hold.set()
    assert (await proxy.http_client.post(url, json=body)).status_code == 200


async def test_running_calls_count_against_the_tokens(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(max_tokens_per_session=60))
    session = proxy.open_session()
    url, body = f"{session.base_url}/chat/completions", {"messages": [QUESTION], "max_tokens": 8}
    engine.hold = asyncio.Event()
    calls = [asyncio.create_task(proxy.http_client.post(url, content=json.dumps(body))) for _ in range(20)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    engine.hold.set()
    statuses = [answer.status_code for answer in await asyncio.gather(*calls)]
    assert set(statuses) == {200, 429}
    nodes = session.tree.completions
    assert sum(len(node.prompt_ids) + len(node.output_ids) for node in nodes) <= 60


async def test_permanent_session_forgets_old_conversations(proxy, session):
    session.turns_kept = 3
    url = f"{session.base_url}/responses"
    ids = [(await proxy.http_client.post(url, json={"input": "Sort 5291"})).json()["id"] for _ in range(4)]
    assert [node.id for node in session.tree.completions] == ids[3:]
    again = await proxy.http_client.post(url, json={"input": "again", "previous_response_id": ids[3]})
    assert again.status_code == 200
    old = await proxy.http_client.post(url, json={"input": "again", "previous_response_id": ids[0]})
    assert old.status_code == 400
