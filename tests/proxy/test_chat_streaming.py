import asyncio
import json
from contextlib import aclosing

import openai
import pytest
from conversations import ADD, ANSWERS, ARGUMENTS, CALL, QUESTION, ask, post

from areal.api.errors import ContextLengthError, EngineError, RequestError
from areal.proxy import ProxyLimits
from areal.trajectory import export


async def stream(client, messages=(QUESTION,), **parameters):
    async with asyncio.timeout(10):
        return [chunk async for chunk in await ask(client, messages, stream=True, **parameters)]


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def calls_of(chunks):
    """Tool calls as a client adds them up."""
    calls = {}
    for chunk in chunks:
        for delta in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""})
            call["arguments"] += delta.function.arguments
    return [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize("said", ANSWERS)
@pytest.mark.parametrize("tools", [[ADD], None], ids=["tools", "no tools"])
async def test_streamed_answer_adds_up_to_the_whole_one(client, engine, said, tools):
    engine.answer = ANSWERS[said]
    offered = {"tools": tools} if tools else {}
    whole = (await ask(client, **offered)).choices[0]
    chunks = await stream(client, **offered)
    assert text_of(chunks) == (whole.message.content or "")
    expected = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [(call["name"], call["arguments"]) for call in calls_of(chunks)] == expected
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


async def test_text_leaves_token_by_token(client, engine, tokenizer):
    engine.answer = "hello there, add the numbers"
    chunks = await stream(client)
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 3


async def test_text_arrives_before_the_answer_is_finished(client, engine, session):
    engine.interrupt_at, engine.hold = 2, asyncio.Event()
    answer = await ask(client, stream=True)
    async with asyncio.timeout(10), aclosing(aiter(answer)) as chunks:
        early = [await anext(chunks) for _ in range(3)]
        assert text_of(early) == "12"
        assert engine.in_flight == 1
        assert session.tree.completions == []
        engine.hold.set()
        assert text_of([*early, *[chunk async for chunk in chunks]]) == "1259"


async def test_chunks_have_every_field_that_clients_read(client, session):
    chunks = await stream(client)
    assert {chunk.id for chunk in chunks} == {session.tree.last.id}
    assert {(chunk.object, chunk.model) for chunk in chunks} == {("chat.completion.chunk", "any-name")}
    assert all(chunk.created > 0 for chunk in chunks)
    assert [chunk.choices[0].index for chunk in chunks] == [0] * len(chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


async def test_usage_ends_the_stream_where_it_was_asked_for(client, session):
    *_, last = await stream(client, stream_options={"include_usage": True})
    node = session.tree.last
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(node.prompt_ids), len(node.output_ids))
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


async def test_tool_call_is_never_streamed_as_text(client, engine):
    engine.answer = f"I will add.\n{CALL}"
    chunks = await stream(client, tools=[ADD])
    assert text_of(chunks) == "I will add."
    (call,) = calls_of(chunks)
    assert (call["name"], call["arguments"]) == ("add", ARGUMENTS)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_tool_call_of_a_stream_is_answered_in_the_next_turn(client, engine, session):
    engine.answer = CALL
    (call,) = calls_of(await stream(client, tools=[ADD]))
    assert call["id"] == session.tree.last.message["tool_calls"][0]["id"]
    function = {"name": call["name"], "arguments": call["arguments"]}
    made = {"id": call["id"], "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "tool_calls": [made]}
    engine.answer = "3"
    await stream(client, [QUESTION, turn, {"role": "tool", "tool_call_id": call["id"], "content": "3"}], tools=[ADD])
    assert [node.parent for node in session.tree.completions] == [None, 0]
    assert session.tree.last.extends


async def test_streamed_answer_is_a_node_like_any_other(client, session):
    await ask(client)
    await stream(client)
    whole, streamed = session.tree.completions
    assert streamed.output_ids.tolist() == whole.output_ids.tolist()
    assert streamed.logprobs.tolist() == whole.logprobs.tolist()
    assert (streamed.message, streamed.text, streamed.end_id) == (whole.message, whole.text, whole.end_id)
    rows = export(session.tree, "individual", 1.0)
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist()


@pytest.mark.parametrize("stop", [",", ["there", ", t"], ["o, x", "lo,"], "zebra"])
async def test_no_part_of_a_stop_text_is_streamed(client, engine, tokenizer, stop):
    engine.answer = tokenizer.encode("hello, there")
    whole = await ask(client, stop=stop)
    assert text_of(await stream(client, stop=stop)) == whole.choices[0].message.content


async def test_truncated_stream_says_so(client):
    chunks = await stream(client, max_tokens=2)
    assert text_of(chunks) == "12"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_logprobs_of_a_stream_come_with_its_end(client):
    chunks = await stream(client, logprobs=True)
    content = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert "".join(token.token for token in content) == "1259"


async def test_sdk_helper_adds_the_stream_up(client, engine):
    engine.answer = CALL
    async with client.chat.completions.stream(model="m", messages=[QUESTION], tools=[ADD]) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


async def test_client_that_leaves_a_stream_aborts_its_generation(client, engine, session):
    engine.interrupt_at, engine.hold = 2, asyncio.Event()
    async with asyncio.timeout(10):
        answer = await ask(client, stream=True)
        async for chunk in answer:
            if chunk.choices[0].delta.content:
                break
        await answer.close()
        await engine.until_in_flight(0)
    assert not session.calls
    assert session.tree.completions == []


async def test_client_that_leaves_before_the_first_token_aborts_its_generation(client, engine, session):
    engine.hold = asyncio.Event()
    call = asyncio.create_task(ask(client, stream=True))
    await engine.until_in_flight(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.until_in_flight(0)
    assert session.tree.completions == []


async def test_ending_the_session_ends_its_streams(client, engine, proxy, session):
    engine.interrupt_at, engine.hold = 2, asyncio.Event()
    answer = await ask(client, stream=True)
    chunks = aiter(answer)
    await anext(chunks)
    ending = asyncio.create_task(proxy.end_session(session))
    with pytest.raises(openai.APIError, match="session has ended"):
        await all_of(chunks)
    await ending
    assert engine.in_flight == 0
    assert session.tree.completions == []


async def test_engine_that_fails_in_mid_stream_is_reported_in_the_stream(client, engine, session):
    engine.interrupt_at, engine.failure = 2, EngineError("it died")
    answer = await ask(client, stream=True)
    with pytest.raises(openai.APIError, match="it died"):
        await all_of(aiter(answer))
    assert session.tree.completions == []


async def test_internal_failure_in_mid_stream_tells_the_client_nothing(proxy, session, engine):
    engine.interrupt_at, engine.failure = 2, ZeroDivisionError("secret path")
    response = await post(proxy, session, stream=True)
    assert "secret" not in response.text
    assert "error" in json.loads(response.text.strip().splitlines()[-1].removeprefix("data: "))


@pytest.mark.parametrize(
    ("failure", "status"),
    [(EngineError("it died"), 503), (ContextLengthError("too long"), 400), (ZeroDivisionError("ours"), 500)],
)
async def test_failure_before_the_first_token_has_its_status(client, engine, failure, status):
    engine.failure = failure
    with pytest.raises(openai.APIStatusError) as error:
        await ask(client, stream=True)
    assert error.value.status_code == status


async def test_stream_that_takes_too_long_is_given_up(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(call_timeout_seconds=0.05))
    engine.interrupt_at, engine.hold = 2, asyncio.Event()
    response = await post(proxy, proxy.open_session(), stream=True)
    assert "engine_unavailable" in response.text
    assert engine.in_flight == 0


async def test_several_choices_are_streamed_side_by_side_and_recorded(client, engine, session, tokenizer):
    scripts = iter(["one", "two hello", CALL])
    engine.script = lambda ids: [*tokenizer.encode(next(scripts)), tokenizer.eos_token_id]
    texts, calls, reasons = ["", "", ""], [], {}
    async for chunk in await ask(client, stream=True, n=3, tools=[ADD], logprobs=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            calls += [(choice.index, call.function.name) for call in choice.delta.tool_calls or () if call.id]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == ["one", "two hello", ""]
    assert calls == [(2, "add")]
    assert reasons == {0: "stop", 1: "stop", 2: "tool_calls"}
    assert [node.choice for node in session.tree.completions] == [0, 1, 2]
    assert [node.text for node in session.tree.completions] == ["one", "two hello", CALL]


async def test_a_choice_that_fails_ends_the_stream_and_leaves_no_trace(client, engine, session):
    engine.interrupt_at = 2
    engine.failure = lambda request: RequestError("no") if len(engine.requests) > 1 else None
    with pytest.raises(openai.APIError):
        async for _ in await ask(client, stream=True, n=2):
            pass
    assert session.tree.completions == []
    await engine.until_in_flight(0)


async def test_log_probs_come_with_their_tokens(client, engine, session, tokenizer):
    engine.answer = "one, two hello"
    told = []
    async for chunk in await ask(client, stream=True, logprobs=True, top_logprobs=2):
        (choice,) = chunk.choices
        entries = choice.logprobs.content if choice.logprobs else []
        assert "".join(entry.token for entry in entries) == (choice.delta.content or "")
        told += entries
    assert "".join(entry.token for entry in told) == "one, two hello"
    assert [entry.logprob for entry in told] == session.tree.last.logprobs.tolist()[:-1]
    assert all(entry.top_logprobs[0].token == entry.token for entry in told)
    assert all(len(entry.top_logprobs) == 2 for entry in told)


async def test_streams_count_as_calls(start_proxy, engine):
    proxy = await start_proxy(ProxyLimits(max_calls_per_session=1))
    session = proxy.open_session()
    engine.interrupt_at, engine.hold = 1, asyncio.Event()
    url, body = f"{session.base_url}/chat/completions", {"messages": [QUESTION], "stream": True}
    async with proxy.http_client.stream("POST", url, json=body):
        assert (await proxy.http_client.post(url, json=body)).status_code == 429
    await engine.until_in_flight(0)


async def all_of(chunks):
    async with asyncio.timeout(10):
        return [chunk async for chunk in chunks]
