import asyncio

import openai
import pytest
from conversations import ANSWERS, ARGUMENTS, CALL, SCHEMA, post
from openai.types.responses import Response

from areal.api.errors import EngineError
from areal.trajectory import assign_reward

ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": None}


async def ask(client, given="Sort 5291", **parameters):
    return await client.responses.create(model="any-name", input=given, **parameters)


async def stream(client, given="Sort 5291", **parameters):
    async with asyncio.timeout(10):
        return [event async for event in await ask(client, given, stream=True, **parameters)]


def said(response):
    """What the output items say, whatever they are called."""
    return [
        (item.type, item.content[0].text if item.type == "message" else (item.name, item.arguments))
        for item in response.output
    ]


async def test_answer_is_a_complete_response(proxy, session):
    wire = (
        await post(proxy, session, route="responses", model="any-name", instructions="be brief", metadata={"a": "b"})
    ).json()
    response = Response.model_validate(wire)
    node = session.tree.last
    assert response.id == node.id
    assert response.id.startswith("resp_")
    assert (response.status, response.model, response.instructions) == ("completed", "any-name", "be brief")
    assert response.output_text == "1259"
    assert response.output[0].role == "assistant"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(node.prompt_ids), len(node.output_ids))
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.metadata == {"a": "b"}


async def test_text_and_a_message_ask_the_same(client, engine):
    await ask(client)
    await ask(client, [{"role": "user", "content": "Sort 5291"}])
    await ask(client, [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sort 5291"}]}])
    assert engine.requests[0].input_ids == engine.requests[1].input_ids == engine.requests[2].input_ids


async def test_instructions_are_the_systems_message(client, engine):
    await ask(client, instructions="be brief")
    await ask(client, [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "Sort 5291"}])
    assert engine.requests[0].input_ids == engine.requests[1].input_ids


async def test_function_call_and_its_output_continue_the_conversation(client, session, engine):
    engine.answer = f"I will add.\n{CALL}"
    first = await ask(client, tools=[ADD])
    assert said(first) == [("message", "I will add."), ("function_call", ("add", ARGUMENTS))]
    engine.answer = "3"
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "3"}
    items = [{"role": "user", "content": "Sort 5291"}, *(item.model_dump() for item in first.output), output]
    await ask(client, items, tools=[ADD])
    assert session.tree.last.parent == 0
    assert session.tree.last.extends


async def test_items_whose_ids_were_dropped_are_the_same_turn(client, session, engine):
    engine.answer = CALL
    first = await ask(client, tools=[ADD])
    call = {"type": "function_call", "call_id": first.output[0].call_id, "name": "add", "arguments": '{"b":2,"a":1}'}
    parts = [{"type": "input_text", "text": "3"}]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": parts}
    await ask(client, [{"role": "user", "content": "Sort 5291"}, call, output], tools=[ADD])
    assert [node.parent for node in session.tree.completions] == [None, 0]


async def test_previous_response_is_continued(client, session, engine):
    engine.answer = CALL
    first = await ask(client, tools=[ADD])
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "3"}
    engine.answer = "3"
    second = await ask(client, [output], previous_response_id=first.id, tools=[ADD])
    third = await ask(client, "and now?", previous_response_id=second.id, tools=[ADD])
    assert [node.parent for node in session.tree.completions] == [None, 0, 1]
    assert all(node.extends for node in session.tree.completions[1:])
    assert third.previous_response_id == second.id


async def test_instructions_are_not_inherited(client, engine, session):
    first = await ask(client, instructions="be brief")
    await ask(client, "again", previous_response_id=first.id, instructions="be long")
    rendered = engine.tokenizer.decode(engine.requests[1].input_ids)
    assert "be long" in rendered
    assert "be brief" not in rendered
    assert "1259" in rendered


async def test_same_instructions_keep_the_conversation_going(client, session):
    first = await ask(client, instructions="be brief")
    second = await ask(client, "again", previous_response_id=first.id, instructions="be brief")
    await ask(client, "again", previous_response_id=second.id, instructions="be brief")
    assert [node.parent for node in session.tree.completions] == [None, 0, 1]
    assert session.tree.last.extends


async def test_response_of_another_session_cannot_be_continued(proxy, session):
    other = proxy.open_session()
    first = (await post(proxy, other, route="responses")).json()
    answer = await post(proxy, session, route="responses", previous_response_id=first["id"])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_response_id_takes_a_reward(client, session):
    first = await ask(client)
    await ask(client, "again", previous_response_id=first.id)
    assign_reward(session.tree, {first.id: 0.5}, "agent")
    assert [node.reward for node in session.tree.completions] == [0.5, None]


async def test_thinking_that_comes_back_belongs_to_its_turn(client, engine):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
    await ask(client, [{"role": "user", "content": "is it?"}, thought, answer, {"role": "user", "content": "sure?"}])
    assert engine.tokenizer.decode(engine.requests[0].input_ids).count("assistant") == 2


async def test_truncated_answer_is_incomplete(client):
    response = await ask(client, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


async def test_bookkeeping_of_the_hosted_service_is_harmless(client, engine):
    await ask(client)
    await ask(client, store=False, include=["reasoning.encrypted_content"], reasoning={"effort": "low"}, user="me")
    await ask(client, text={"verbosity": "low", "format": {"type": "text"}}, truncation="disabled", metadata={"a": "b"})
    plain, *kept = engine.requests
    assert [(each.input_ids, each.gconfig) for each in kept] == [(plain.input_ids, plain.gconfig)] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("truncation", "some"),
        ("top_logprobs", 21),
        ("max_tool_calls", 1),
        ("prompt", {"id": "p"}),
        ("stop", ","),
        ("seed", 1),
        ("temperature", 3),
        ("max_output_tokens", 0),
        ("instructions", 5),
        ("stream", "yes"),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", {"type": "web_search"}),
        ("tool_choice", "required"),
        ("text.format", {"format": {"type": "grammar"}}),
        ("input", []),
        ("input", None),
        ("input[0]", [{"type": "item_reference", "id": "x"}]),
        ("input[0].role", [{"role": "robot", "content": "x"}]),
        ("input[0].content", [{"role": "user", "content": None}]),
        ("input[0].content[0]", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input[0].call_id", [{"type": "function_call", "name": "add", "arguments": "{}"}]),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(proxy, session, engine, name, value):
    response = await post(proxy, session, route="responses", **{name.partition("[")[0].partition(".")[0]: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert engine.requests == []


@pytest.mark.parametrize("answer", ANSWERS)
async def test_streamed_response_is_the_whole_one(client, engine, answer):
    engine.answer = ANSWERS[answer]
    whole = await ask(client, tools=[ADD])
    events = await stream(client, tools=[ADD])
    assert sorted(said(events[-1].response), key=str) == sorted(said(whole), key=str)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert events[-1].response.usage == whole.usage
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert sorted(done, key=lambda item: item.id) == sorted(events[-1].response.output, key=lambda item: item.id)


async def test_events_of_a_text_come_in_order(client):
    events = await stream(client)
    kinds = [event.type for event in events]
    assert [kind for at, kind in enumerate(kinds) if kind not in kinds[:at]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


async def test_events_of_a_call_come_in_order(client, engine):
    engine.answer = CALL
    events = await stream(client, tools=[ADD])
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[4].arguments == ARGUMENTS
    assert (events[2].item.name, events[2].item.arguments) == ("add", "")


async def test_text_after_a_call_that_comes_back_is_the_same_turn(client, session, engine):
    engine.answer = ANSWERS["text after a call"]
    final = (await stream(client, tools=[ADD]))[-1].response
    call = next(item for item in final.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items = [{"role": "user", "content": "Sort 5291"}, *(item.model_dump() for item in final.output), output]
    await ask(client, items, tools=[ADD])
    assert session.tree.last.parent == 0


async def test_truncated_stream_is_incomplete(client):
    events = await stream(client, max_output_tokens=2)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.status == "incomplete"


async def test_sdk_helper_adds_the_stream_up(client, engine):
    engine.answer = f"I will add.\n{CALL}"
    async with client.responses.stream(model="m", input="Sort", tools=[{**ADD, "strict": True}]) as events:
        async for _ in events:
            pass
        final = await events.get_final_response()
    assert said(final) == [("message", "I will add."), ("function_call", ("add", ARGUMENTS))]


async def test_client_that_leaves_a_stream_aborts_its_generation(client, engine, session):
    engine.interrupt_at, engine.hold = 2, asyncio.Event()
    async with asyncio.timeout(10):
        answer = await ask(client, stream=True)
        async for event in answer:
            if event.type == "response.output_text.delta":
                break
        await answer.close()
        await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_failure_in_mid_stream_is_an_error_event(client, engine):
    engine.interrupt_at, engine.failure = 2, EngineError("it died")
    with pytest.raises(openai.APIError, match="it died"):
        await stream(client)
