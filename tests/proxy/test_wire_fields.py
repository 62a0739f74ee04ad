"""Fields that agents seldom send: honoured as docs/wire.md says, and every token that is trained was sampled."""

import copy
import re

import pytest
from conversations import ADD, ARGUMENTS, CALL, QUESTION, SCHEMA, post
from test_thinking import TEMPLATE

from areal.api.io_struct import Steering
from areal.trajectory import export

STEERED = {"frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"7": 3, "8": -100}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
SUBTRACT = {"type": "function", "function": {"name": "subtract", "parameters": SCHEMA}}
SWITCHED = TEMPLATE + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


async def test_log_probs_have_the_bytes_of_tokens_that_hold_part_of_a_character(proxy, session, engine):
    engine.answer = "zwölf 🙂 你好"
    answer = (await post(proxy, session, messages=[QUESTION], logprobs=True)).json()
    told = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in told for byte in entry["bytes"]).decode() == "zwölf 🙂 你好"
    assert any("\N{REPLACEMENT CHARACTER}" in entry["token"] for entry in told), "this tokenizer cuts characters"


async def test_alternatives_are_asked_of_the_engine_only_when_a_call_asks(proxy, session, engine):
    await post(proxy, session, messages=[QUESTION], logprobs=True)
    await post(proxy, session, messages=[QUESTION], logprobs=True, top_logprobs=4)
    assert [request.top_logprobs for request in engine.requests] == [0, 4]
    refused = await post(proxy, session, messages=[QUESTION], top_logprobs=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("name", STEERED)
async def test_what_changes_the_distribution_is_refused_by_name_where_answers_are_trained(proxy, session, engine, name):
    for route, asked in (("chat/completions", {"messages": [QUESTION]}), ("completions", {"prompt": "hi"})):
        refused = await post(proxy, session, route=route, **asked, **{name: STEERED[name]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert engine.requests == []


async def test_a_served_model_can_be_steered(start_proxy, engine):
    proxy = await start_proxy(trained=False)
    await post(proxy, proxy.open_session(), messages=[QUESTION], **STEERED)
    await post(proxy, proxy.open_session(), messages=[QUESTION], frequency_penalty=0, logit_bias={})
    assert [each.steering for each in engine.requests] == [Steering(0.5, -1.0, {7: 3.0, 8: -100.0}), None]


@pytest.mark.parametrize("wrong", [{"x": 1}, {"5": 101}, {"5": "a"}, {"-1": 1}, {"5.0": 1}, {"99999": 1}])
async def test_a_bias_of_no_token_is_refused(start_proxy, wrong):
    proxy = await start_proxy(trained=False)
    assert (await post(proxy, proxy.open_session(), messages=[QUESTION], logit_bias=wrong)).status_code == 400


async def test_an_answer_that_was_begun_goes_on_and_trains_only_what_was_sampled(proxy, session, engine, tokenizer):
    engine.answer = " 1259"
    begun = [QUESTION, {"role": "assistant", "content": "It is"}]
    for stream in (False, True):
        body = {"messages": begun, "max_tokens": 9, "stream": stream, "stop_sequences": ["It"]}
        answer = await post(proxy, session, route="messages", **body)
        assert "It is" not in answer.text
        assert "".join(re.findall(r'"text":"([^"]+)"', answer.text)) == " 1259"
        assert '"stop_sequence":null' in answer.text
    prompt = engine.requests[0].input_ids
    assert tokenizer.decode(prompt).endswith("assistant\nIt is")
    (row,) = export(session.tree, "individual", 1.0)[:1]
    sampled = [*tokenizer.encode(" 1259"), tokenizer.eos_token_id]
    assert row.input_ids.tolist() == [*prompt, *sampled]
    assert row.input_ids[row.loss_mask].tolist() == sampled
    again = [QUESTION, {"role": "assistant", "content": "It is 1259"}, {"role": "user", "content": "sure?"}]
    await post(proxy, session, route="messages", messages=again, max_tokens=9)
    assert engine.requests[-1].input_ids[: len(row.input_ids)] == row.input_ids.tolist()
    assert session.tree.last.extends


@pytest.mark.parametrize("last", ["", [{"type": "tool_use", "id": "x", "name": "add", "input": {}}]])
async def test_only_a_text_can_begin_an_answer(proxy, session, last):
    begun = [QUESTION, {"role": "assistant", "content": last}]
    assert (await post(proxy, session, route="messages", messages=begun, max_tokens=9)).status_code == 400


async def test_an_answer_with_a_format_cannot_be_begun(proxy, session, engine):
    begun = [QUESTION, {"role": "assistant", "content": "{"}]
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = await post(proxy, session, route="messages", messages=begun, max_tokens=9, output_config=config)
    assert (answer.status_code, engine.requests) == (400, [])
    assert "which is that of a whole answer" in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_demanded_call_that_is_cut_off_shows_no_marks_in_any_dialect(proxy, session, engine, stream):
    flat = {"name": "add", **{"parameters": SCHEMA, "type": "function"}}
    bodies = {
        "chat/completions": ({"messages": [QUESTION], "tools": [ADD], "tool_choice": "required"}, "max_tokens"),
        "responses": ({"input": "hi", "tools": [flat], "tool_choice": "required"}, "max_output_tokens"),
        "messages": (
            {
                "messages": [QUESTION],
                "tools": [{"name": "add", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
            },
            "max_tokens",
        ),
    }
    engine.answer = f"{CALL}\n{CALL}"
    for route, (body, limit) in bodies.items():
        for most in (1, 2, 5, 12, 20):
            answer = await post(proxy, session, route=route, **body, **{limit: most}, stream=stream)
            assert answer.status_code == 200, answer.text
            assert "tool_call>" not in answer.text
            assert any(reason in answer.text for reason in ('"length"', '"incomplete"', '"max_tokens"'))


async def test_only_allowed_tools_are_offered(proxy, session, engine, tokenizer):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    engine.answer = CALL
    await post(proxy, session, messages=[QUESTION], tools=[ADD, SUBTRACT], tool_choice=choice)
    prompt = tokenizer.decode(engine.requests[0].input_ids)
    assert "add" in prompt
    assert "subtract" not in prompt
    allowed["tools"] = [{"type": "function", "function": {"name": "multiply"}}]
    refused = await post(proxy, session, messages=[QUESTION], tools=[ADD, SUBTRACT], tool_choice=choice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_conversation_in_functions_goes_on_with_the_same_tokens(proxy, session, engine):
    engine.answer = CALL
    answer = (await post(proxy, session, messages=[QUESTION], functions=[FUNCTION])).json()["choices"][0]
    assert answer["finish_reason"] == "function_call"
    assert answer["message"]["function_call"] == {"name": "add", "arguments": ARGUMENTS}
    assert "tool_calls" not in answer["message"]
    engine.answer = "3"
    again = [QUESTION, answer["message"], {"role": "function", "name": "add", "content": "3"}]
    await post(proxy, session, messages=again, functions=[FUNCTION])
    assert session.tree.last.extends
    assert session.tree.last.parent == 0


async def test_a_custom_tool_is_called_and_answered_with_text(proxy, session, engine):
    engine.answer = '<tool_call>\n{"name": "run", "arguments": {"input": "ls"}}\n</tool_call>'
    tools = [{"type": "custom", "name": "run"}]
    (call,) = (await post(proxy, session, route="responses", input=[QUESTION], tools=tools)).json()["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "ls")
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "a b"}
    await post(proxy, session, route="responses", input=[QUESTION, call, result], tools=tools)
    assert session.tree.last.extends


async def test_the_oldest_questions_are_left_out_of_what_is_too_long(proxy, session, engine, tokenizer):
    long = {"role": "user", "content": "hello there " * 20}
    turns = [{"role": "system", "content": "be brief"}, *[long, {"role": "assistant", "content": "yes"}] * 20, QUESTION]
    answer = await post(proxy, session, route="responses", input=turns, truncation="auto", max_output_tokens=9)
    assert answer.status_code == 200
    assert answer.json()["truncation"] == "auto"
    prompt = tokenizer.decode(engine.requests[0].input_ids)
    assert "be brief" in prompt
    assert "Sort 5291" in prompt
    assert 1 <= prompt.count("yes") < 20
    refused = await post(proxy, session, route="responses", input=turns, max_output_tokens=9)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    alone = await post(proxy, session, route="responses", input="hello there " * 2000, truncation="auto")
    assert alone.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("template", ["never", "always", "switched"])
async def test_thinking_is_switched_where_the_template_can(start_proxy, engine, tokenizer, template):
    engine.tokenizer = copy.deepcopy(tokenizer)
    engine.tokenizer.chat_template = {
        "never": tokenizer.chat_template,
        "always": TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"),
        "switched": SWITCHED,
    }[template]
    proxy = await start_proxy()
    asked = {
        "chat/completions": [{"messages": [QUESTION], "reasoning_effort": effort} for effort in ("none", "high")],
        "messages": [
            {"messages": [QUESTION], "max_tokens": 9, "thinking": thinking}
            for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024})
        ],
    }
    for route, (without, with_thinking) in asked.items():
        engine.requests.clear()
        off = await post(proxy, proxy.open_session(), route=route, **without)
        on = await post(proxy, proxy.open_session(), route=route, **with_thinking)
        expected = {"never": (200, 400), "always": (400, 200), "switched": (200, 200)}[template]
        assert (off.status_code, on.status_code) == expected
        closed = [tokenizer.decode(each.input_ids).endswith("</think>\n\n") for each in engine.requests]
        assert closed == ([True, False] if template == "switched" else [False])
