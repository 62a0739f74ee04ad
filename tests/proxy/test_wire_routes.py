"""Routes beside those that call a model in a conversation, and what every answer has."""

import anthropic
import httpx
import openai
import pytest
from conversations import ADD, QUESTION, post

from areal.trajectory import export


async def test_a_prompt_goes_to_the_model_as_it_is(client, session, engine, tokenizer):
    engine.answer = "1259"
    text = await client.completions.create(model="m", prompt="Sort 5291 into", logprobs=2)
    ids = tokenizer.encode("Sort 5291 into")
    numbered = await client.completions.create(model="m", prompt=ids)
    assert text.choices[0].text == numbered.choices[0].text == "1259"
    assert [request.input_ids for request in engine.requests] == [ids, ids]
    assert engine.requests[0].gconfig.max_new_tokens == 16
    assert len(text.choices[0].logprobs.top_logprobs[0]) == 2
    row = export(session.tree, "individual", 1.0)[0]
    assert row.input_ids[~row.loss_mask].tolist() == ids
    chat = [{"role": "user", "content": "Sort 5291 into"}, {"role": "assistant", "content": "1259"}, QUESTION]
    await client.chat.completions.create(model="m", messages=chat)
    assert session.tree.last.parent is None, "a conversation does not continue a raw prompt"


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, -1], [True], [10**9], {"a": 1}])
async def test_a_prompt_that_is_none_is_refused(proxy, session, prompt):
    assert (await post(proxy, session, route="completions", prompt=prompt)).status_code == 400


async def test_counted_tokens_are_those_of_the_prompt(claude, session, engine):
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    asked = {"model": "m", "messages": [QUESTION], "system": "be brief", "tools": [tool]}
    counted = await claude.messages.count_tokens(**asked)
    assert engine.requests == []
    answer = await claude.messages.create(max_tokens=9, **asked)
    assert counted.input_tokens == answer.usage.input_tokens == len(engine.requests[0].input_ids)
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.count_tokens(model="m", messages=[])


async def test_a_stored_response_is_there_until_it_is_deleted(client, session, engine):
    response = await client.responses.create(model="m", input="hi", instructions="be brief")
    assert await client.responses.retrieve(response.id) == response
    await client.responses.create(model="m", input="go on", previous_response_id=response.id)
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="m", input="go on", previous_response_id=response.id)
    assert session.tree.by_id(response.id) is not None, "what was sampled is still trained"
    unstored = await client.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)


async def test_a_streamed_response_is_stored_too_and_no_other_session_gets_it(client, proxy):
    stream = await client.responses.create(model="m", input="hi", stream=True)
    *_, last = [event async for event in stream]
    assert (await client.responses.retrieve(last.response.id)).output == last.response.output
    other = proxy.open_session()
    headers = {"authorization": f"Bearer {other.api_key}"}
    asked = await proxy.http_client.get(f"{other.base_url}/responses/{last.response.id}", headers=headers)
    assert asked.status_code == 404


async def test_the_model_is_told_in_the_clients_dialect(start_proxy):
    proxy = await start_proxy(model_name="org/model")
    session = proxy.open_session()
    url, key = session.base_url, {"authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(trust_env=False, headers=key) as http:
        ours = {"anthropic-version": "2023-06-01"}
        assert (await http.get(f"{url}/models/org/model")).json()["object"] == "model"
        assert (await http.get(f"{url}/models/org/model", headers=ours)).json()["type"] == "model"
        assert (await http.get(f"{url}/models", headers=ours)).json()["first_id"] == "org/model"
        unknown = await http.get(f"{url}/models/gpt")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        for path in ("models/gpt", "nothing"):
            assert (await http.get(f"{url}/{path}", headers=ours)).json()["type"] == "error"
        assert (await http.get(f"{url}/messages/nothing")).json()["type"] == "error"


async def test_another_model_is_refused_only_when_that_is_wanted(start_proxy):
    for strict, status in ((False, 200), (True, 404)):
        proxy = await start_proxy(model_name="mine", strict_model=strict)
        session = proxy.open_session()
        assert (await post(proxy, session, messages=[QUESTION], model="mine")).status_code == 200
        assert (await post(proxy, session, messages=[QUESTION])).status_code == 200
        other = await post(proxy, session, messages=[QUESTION], model="other")
        assert other.status_code == status
    assert other.json()["error"]["code"] == "model_not_found"


async def test_every_answer_over_the_network_has_its_own_id(proxy, session):
    async with httpx.AsyncClient(trust_env=False) as http:
        answers = [await http.get(f"{session.base_url}/{path}") for path in ("models", "health", "nothing")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert ids == [answer.headers["request-id"] for answer in answers]


async def test_a_wrong_key_is_answered_with_the_remedy_of_whoever_serves(start_proxy):
    proxy = await start_proxy(key_remedy="look at the wall")
    answer = await proxy.http_client.get(f"{proxy.origin}/v1/models", headers={"authorization": "Bearer no"})
    assert answer.status_code == 401
    assert "look at the wall" in answer.text
    assert "extra_kwargs" not in answer.text
