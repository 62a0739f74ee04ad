import asyncio

import pytest
from conversations import ADD, CALL, QUESTION, ask, post

from areal.api.engine_api import WeightUpdate
from areal.config.rollout import GenerationHyperparameters
from areal.trajectory import assign_reward, export


async def test_answer_has_every_field_that_clients_read(client, session):
    completion = await ask(client)
    (choice,) = completion.choices
    assert completion.id == session.tree.last.id
    assert completion.id.startswith("chatcmpl-")
    assert (completion.object, completion.model) == ("chat.completion", "any-name")
    assert completion.created > 0
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "1259", None)
    usage = completion.usage
    assert usage.prompt_tokens == len(session.tree.last.prompt_ids)
    assert usage.completion_tokens == len(session.tree.last.output_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_next_turn_sends_the_sampled_ids_again(client, session, engine, tokenizer):
    letters = [token for letter in "hello" for token in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("hello")
    engine.answer = [*letters, tokenizer.eos_token_id]
    first = await ask(client)
    await ask(client, [QUESTION, first.choices[0].message, {"role": "user", "content": "again"}])
    known = [*engine.requests[0].input_ids, *engine.answer]
    assert engine.requests[1].input_ids[: len(known)] == known
    assert [node.parent for node in session.tree.completions] == [None, 0]
    assert session.tree.rewrites == 0


async def test_tool_call_and_its_result_continue_the_conversation(client, session, engine):
    engine.answer = CALL
    first = await ask(client, tools=[ADD])
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1, "b": 2}')
    engine.answer = "3"
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    await ask(client, [QUESTION, message.model_dump(), result], tools=[ADD])
    assert session.tree.last.parent == 0
    assert session.tree.last.extends


async def test_malformed_tool_call_reaches_the_agent_as_text(client, engine):
    engine.answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'
    completion = await ask(client, tools=[ADD])
    assert completion.choices[0].message.content == engine.answer
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("parameters", [{}, {"tools": [ADD], "tool_choice": "none"}])
async def test_without_tools_to_call_nothing_is_a_call(client, engine, parameters):
    engine.answer = CALL
    completion = await ask(client, **parameters)
    assert completion.choices[0].message.content == CALL
    assert "add" not in engine.tokenizer.decode(engine.requests[0].input_ids)


async def test_one_tool_call_is_all_where_parallel_calls_are_off(client, engine):
    engine.answer = CALL
    completion = await ask(client, tools=[ADD], parallel_tool_calls=False)
    assert engine.requests[0].gconfig.stop == ["</tool_call>"]
    assert len(completion.choices[0].message.tool_calls) == 1


async def test_choices_are_siblings_and_the_response_is_named_after_the_first(client, session, engine):
    completion = await ask(client, n=3, seed=5)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({node.id for node in session.tree.completions}) == 3
    assert [request.gconfig.seed for request in engine.requests] == [5, 6, 7]
    assign_reward(session.tree, {completion.id: 1.0}, "agent")
    assert [node.reward for node in session.tree.completions] == [1.0, None, None]


async def test_truncated_answer_says_so(client, session):
    completion = await ask(client, max_tokens=2)
    assert completion.choices[0].finish_reason == "length"
    (row,) = export(session.tree, "individual", 1.0)
    assert row.truncated


async def test_logprobs_of_the_sampled_tokens(client, session):
    completion = await ask(client, logprobs=True)
    content = completion.choices[0].logprobs.content
    assert "".join(token.token for token in content) == "1259"
    assert [token.logprob for token in content] == session.tree.last.logprobs.tolist()[:-1]


async def test_stop_text_ends_the_answer_before_it(client, engine, session, tokenizer):
    engine.answer = tokenizer.encode("one, two")
    completion = await ask(client, stop=",")
    assert engine.requests[0].gconfig.stop == [","]
    assert completion.choices[0].message.content == "one"
    sampled = session.tree.last.output_ids.tolist()
    assert sampled == engine.answer[: len(sampled)]
    assert tokenizer.decode(sampled) == "one,", "the stop text was sampled, and is recorded"


async def test_request_overrides_the_sessions_sampling(client, engine):
    await ask(client, temperature=0.3, top_p=0.5, seed=11, max_completion_tokens=9)
    sampling = engine.requests[0].gconfig
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_new_tokens) == (0.3, 0.5, 11, 9)
    assert not sampling.greedy


@pytest.mark.parametrize("temperature", [0, 1e-38, 9e-5])
async def test_a_temperature_of_about_zero_is_greedy(client, engine, session, temperature):
    await ask(client, temperature=temperature)
    assert engine.requests[0].gconfig.greedy
    assert session.tree.last.temperature == 1.0


async def test_sessions_own_sampling_is_the_default(start_proxy, engine, tokenizer):
    proxy = await start_proxy(temperature=0.9)
    plain = proxy.open_session()
    greedy = proxy.open_session(gconfig=GenerationHyperparameters(greedy=True, max_new_tokens=5))
    for session in (plain, greedy):
        assert (await post(proxy, session)).status_code == 200
    first, second = (request.gconfig for request in engine.requests)
    assert (first.temperature, first.greedy, first.max_new_tokens) == (0.9, False, 64)
    assert (second.greedy, second.max_new_tokens) == (True, 5)
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} <= set(first.stop_token_ids)
    assert plain.tree.last.temperature == 0.9


async def test_calls_of_one_session_may_run_at_once(client, session, engine):
    questions = [[{"role": "user", "content": f"Sort {number}"}] for number in range(16)]
    completions = await asyncio.gather(*(ask(client, messages) for messages in questions))
    assert {completion.id for completion in completions} == {node.id for node in session.tree.completions}
    assert len(session.tree.completions) == 16


async def test_content_in_parts_is_one_text(client, engine):
    parts = [{"type": "text", "text": "Sort "}, {"type": "text", "text": "5291"}]
    await ask(client, [{"role": "user", "content": parts}])
    await ask(client)
    assert engine.requests[0].input_ids == engine.requests[1].input_ids


async def test_developer_speaks_as_the_system(client, engine):
    for role in ("developer", "system"):
        await ask(client, [{"role": role, "content": "be brief"}, QUESTION])
    assert engine.requests[0].input_ids == engine.requests[1].input_ids


async def test_bookkeeping_of_the_hosted_service_is_harmless(client, engine):
    await ask(client)
    await ask(client, user="me", store=False, metadata={"a": "b"}, frequency_penalty=0, stream=False)
    plain, kept = engine.requests
    assert (kept.input_ids, kept.gconfig) == (plain.input_ids, plain.gconfig)


async def test_weights_of_the_tokens_are_remembered(client, session, engine):
    await engine.update_weights(WeightUpdate(7, "digest", path=""))
    await ask(client)
    assert session.tree.digests == {7: "digest"}
    (row,) = export(session.tree, "individual", 1.0)
    assert set(row.versions[row.loss_mask].tolist()) == {7}
