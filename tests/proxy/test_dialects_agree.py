"""One conversation, three wires: the same tokens in, the same tokens out, the same tree."""

import httpx
import pytest
from conversations import ADD, ARGUMENTS, CALL, SCHEMA

DIALECTS = ["chat", "responses", "messages"]
SYSTEM, ASKED, RESULT, MORE = "be brief", "What is 1 + 2?", "3", "and again?"


def chat_body(call_id):
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    later = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": RESULT},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": [{"type": "text", "text": MORE}]},
    ]
    system = {"role": "system", "content": SYSTEM}
    turns = [system, {"role": "user", "content": ASKED}, *later[: 0 if call_id is None else 4]]
    return {"messages": turns, "tools": [ADD]}


def responses_body(call_id):
    later = [
        {"type": "function_call", "call_id": call_id, "name": "add", "arguments": ARGUMENTS, "id": "fc_1"},
        {"type": "function_call_output", "call_id": call_id, "output": RESULT},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 3."}]},
        {"role": "user", "content": [{"type": "input_text", "text": MORE}]},
    ]
    tool = {"type": "function", "name": "add", "parameters": SCHEMA, "description": "Add."}
    items = [{"role": "user", "content": ASKED}, *later[: 0 if call_id is None else 4]]
    return {"input": items, "instructions": SYSTEM, "tools": [tool]}


def messages_body(call_id):
    call = {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": 1, "b": 2}}
    later = [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": RESULT}]},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": [{"type": "text", "text": MORE}]},
    ]
    tool = {"name": "add", "input_schema": SCHEMA, "description": "Add."}
    turns = [{"role": "user", "content": ASKED}, *later[: 0 if call_id is None else 4]]
    return {"messages": turns, "system": SYSTEM, "tools": [tool], "max_tokens": 64}


BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body}
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


async def post(proxy, session, dialect, call_id=None) -> httpx.Response:
    response = await proxy.http_client.post(f"{session.base_url}/{PATHS[dialect]}", json=BODIES[dialect](call_id))
    assert response.status_code == 200, response.text
    return response


async def test_same_question_is_the_same_tokens(proxy, session, engine):
    for dialect in DIALECTS:
        await post(proxy, session, dialect)
    first, second, third = (request.input_ids for request in engine.requests)
    assert first == second == third


async def test_same_history_that_was_not_sampled_is_the_same_tokens(proxy, session, engine):
    for dialect in DIALECTS:
        await post(proxy, session, dialect, "call_1")
    first, second, third = (request.input_ids for request in engine.requests)
    assert first == second == third


@pytest.mark.parametrize("asked", DIALECTS)
@pytest.mark.parametrize("continued", DIALECTS)
async def test_conversation_begun_in_one_dialect_goes_on_in_another(proxy, session, engine, asked, continued):
    engine.answer = CALL
    await post(proxy, session, asked)
    sampled = session.tree.last
    engine.answer = "3"
    await post(proxy, session, continued, sampled.message["tool_calls"][0]["id"])
    known = [*engine.requests[0].input_ids, *sampled.output_ids.tolist()]
    assert engine.requests[1].input_ids[: len(known)] == known
    assert session.tree.last.parent == 0
