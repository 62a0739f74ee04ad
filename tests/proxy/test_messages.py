import asyncio

import anthropic
import pytest
from anthropic.types import Message
from conversations import ANSWERS, CALL, QUESTION, SCHEMA, post

from areal.api.errors import ContextLengthError, EngineError
from areal.trajectory import assign_reward

ADD = {"name": "add", "description": "Add.", "input_schema": SCHEMA}


async def ask(claude, messages=(QUESTION,), **parameters):
    parameters.setdefault("max_tokens", 64)
    return await claude.messages.create(model="any-name", messages=list(messages), **parameters)


async def stream(claude, messages=(QUESTION,), **parameters):
    async with asyncio.timeout(10):
        return [event async for event in await ask(claude, messages, stream=True, **parameters)]


def said(blocks):
    return [block.text if block.type == "text" else (block.name, block.input) for block in blocks]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message):
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


async def test_answer_is_a_complete_message(proxy, session):
    wire = (await post(proxy, session, route="messages", model="any-name")).json()
    message = Message.model_validate(wire)
    node = session.tree.last
    assert message.id == node.id
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "any-name")
    assert said(message.content) == ["1259"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(node.prompt_ids), len(node.output_ids))


async def test_message_id_takes_a_reward(claude, session):
    message = await ask(claude)
    assign_reward(session.tree, {message.id: 0.5}, "agent")
    assert session.tree.last.reward == 0.5


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_key_alone_names_the_session(proxy, session, header):
    key = f"Bearer {session.api_key}" if header == "authorization" else session.api_key
    body = {"messages": [QUESTION], "max_tokens": 9}
    for prefix in ("", "/v1"):
        response = await proxy.http_client.post(f"{proxy.origin}{prefix}/messages", json=body, headers={header: key})
        assert response.json()["id"] == session.tree.last.id


async def test_tool_use_and_its_result_continue_the_conversation(claude, session, engine):
    engine.answer = f"I will add.\n{CALL}"
    first = await ask(claude, tools=[ADD])
    assert said(first.content) == ["I will add.", ("add", {"a": 1, "b": 2})]
    assert first.stop_reason == "tool_use"
    engine.answer = "3"
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "3"}]}
    turns = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    await ask(claude, turns, tools=[ADD])
    assert session.tree.last.parent == 0
    assert session.tree.last.extends


async def test_result_and_text_of_one_turn_are_two_messages(claude, engine, session):
    engine.answer = CALL
    first = await ask(claude, tools=[ADD])
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "3"}
    more = {"type": "text", "text": "go on"}
    await ask(
        claude,
        [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result, more]}],
        tools=[ADD],
    )
    assert [message["role"] for message in session.tree.last.messages] == ["tool", "user"]


async def test_system_is_text_or_blocks(claude, engine):
    await ask(claude, system="be brief")
    cached = {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}}
    await ask(claude, system=[cached, {"type": "text", "text": "brief"}])
    assert engine.requests[0].input_ids == engine.requests[1].input_ids
    assert "be brief" in engine.tokenizer.decode(engine.requests[0].input_ids)


async def test_thinking_that_comes_back_belongs_to_its_turn(claude, engine):
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yes"}]
    await ask(claude, [QUESTION, {"role": "assistant", "content": blocks}, QUESTION])
    assert engine.tokenizer.decode(engine.requests[0].input_ids).count("assistant") == 2


async def test_request_overrides_the_sessions_sampling(claude, engine, tokenizer):
    engine.answer = tokenizer.encode("one, two")
    sampled = {"temperature": 0.3, "top_p": 0.5, "top_k": 7}
    message = await ask(claude, extra_body=sampled, stop_sequences=[","], max_tokens=9)
    sampling = engine.requests[0].gconfig
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.3, 0.5, 7, 9)
    assert said(message.content) == ["one"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ",")


async def test_truncated_answer_says_so(claude):
    assert (await ask(claude, max_tokens=2)).stop_reason == "max_tokens"


async def test_one_call_is_all_where_parallel_use_is_off(claude, engine):
    engine.answer = CALL
    await ask(claude, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert engine.requests[0].gconfig.stop == ["</tool_call>"]


async def test_without_tools_to_call_nothing_is_a_call(claude, engine):
    engine.answer = CALL
    message = await ask(claude, tools=[ADD], tool_choice={"type": "none"})
    assert said(message.content) == [CALL]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
        ("container", "c"),
        ("mcp_servers", [{"type": "url"}]),
        ("output_config", {"effort": "high"}),
        ("output_config", {"format": {"type": "grammar"}}),
        ("max_tokens", None),
        ("max_tokens", 0),
        ("temperature", 2),
        ("top_k", -1),
        ("stop_sequences", [""]),
        ("stream", "yes"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("tool_choice", {"type": "maybe"}),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "add"}),
        ("messages", []),
        ("messages", [{"role": "assistant", "content": "I begin"}]),
        ("messages[0].role", [{"role": "robot", "content": "x"}]),
        ("messages[0].content", [{"role": "user", "content": []}]),
        ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("system[0]", [{"type": "image"}]),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(proxy, session, engine, name, value):
    response = await post(proxy, session, route="messages", **{name.partition("[")[0]: value})
    body = response.json()
    assert response.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert name in body["error"]["message"]
    assert engine.requests == []


async def test_errors_are_those_of_the_sdk(claude, engine, proxy, session):
    engine.failure = EngineError("it died")
    with pytest.raises(anthropic.APIStatusError, match="it died") as error:
        await ask(claude)
    assert (error.value.status_code, error.value.body["error"]["type"]) == (503, "overloaded_error")
    engine.failure = ContextLengthError("too long")
    with pytest.raises(anthropic.BadRequestError) as error:
        await ask(claude)
    assert error.value.body["error"]["code"] == "context_length_exceeded"
    await proxy.end_session(session)
    with pytest.raises(anthropic.APIStatusError) as error:
        await ask(claude)
    assert error.value.status_code == 410


async def test_unknown_key_is_an_authentication_error(proxy):
    response = await proxy.http_client.post(f"{proxy.origin}/v1/messages", json={}, headers={"x-api-key": "unknown"})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


async def test_events_come_in_order(claude, engine, session):
    engine.answer = f"I will add.\n{CALL}"
    events = await stream(claude, tools=[ADD])
    kinds = [event.type for event in events]
    assert [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    first, last = events[0].message, events[-2]
    assert (first.content, first.stop_reason) == ([], None)
    assert first.usage.input_tokens > 0
    assert last.delta.stop_reason == "tool_use"
    assert last.usage.output_tokens == len(session.tree.last.output_ids)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_streamed_message_is_the_whole_one(claude, engine, answer):
    engine.answer = ANSWERS[answer]
    whole = await ask(claude, tools=[ADD])
    async with (
        asyncio.timeout(10),
        claude.messages.stream(model="m", max_tokens=64, messages=[QUESTION], tools=[ADD]) as events,
    ):
        final = await events.get_final_message()
    assert text_of(final) == text_of(whole)
    assert calls_of(final) == calls_of(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


async def test_streamed_blocks_that_come_back_are_the_same_turn(claude, session, engine):
    engine.answer = f"I will add.\n{CALL}\nnow"
    async with claude.messages.stream(model="m", max_tokens=64, messages=[QUESTION], tools=[ADD]) as events:
        first = await events.get_final_message()
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    turns = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    await ask(claude, turns, tools=[ADD])
    assert session.tree.last.parent == 0


async def test_client_that_leaves_a_stream_aborts_its_generation(claude, engine, session):
    engine.interrupt_at, engine.hold = 2, asyncio.Event()
    async with asyncio.timeout(10):
        answer = await ask(claude, stream=True)
        async for event in answer:
            if event.type == "content_block_delta":
                break
        await answer.close()
        await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_failure_in_mid_stream_is_an_error_event(claude, engine):
    engine.interrupt_at, engine.failure = 2, EngineError("it died")
    with pytest.raises(anthropic.APIStatusError, match="it died"):
        await stream(claude)
