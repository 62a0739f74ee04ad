"""Answers and streams of many kinds against OpenAI's published schema (openapi/) and the types of its SDK."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conversations import ADD, ANSWERS, CALL, QUESTION, SCHEMA
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_thinking import TEMPLATE

SCHEMAS = json.loads((Path(__file__).parent / "openapi" / "schemas.json").read_text(encoding="utf-8"))
EVENTS = {
    schema["properties"]["type"]["enum"][0]: name
    for name, schema in SCHEMAS["components"]["schemas"].items()
    if {"$ref": f"#/components/schemas/{name}"} in SCHEMAS["components"]["schemas"]["ResponseStreamEvent"]["anyOf"]
}
"""The schema of each type of event."""
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THOUGHT = "<think>\nfirst 1, then 2\n</think>\n\n"
RUN = '<tool_call>\n{"name": "run", "arguments": {"input": "ls"}}\n</tool_call>'
LOGPROBS = {"logprobs": True, "top_logprobs": 3}
TEXT_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
RUN_NESTED = {"type": "custom", "custom": {"name": "run", "description": "Run.", "format": {"type": "text"}}}
FLAT = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": False}}

CHAT: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"says {name}": (said, {"tools": [ADD]}) for name, said in ANSWERS.items()},
    "log-probs": ("zwölf 你好 🙂!", LOGPROBS),
    "log-probs of a call": (CALL, {**LOGPROBS, "tools": [ADD]}),
    "several choices": ("1259", {"n": 3, **LOGPROBS}),
    "thinking": (f"{THOUGHT}1259", LOGPROBS),
    "thinking before a call": (f"{THOUGHT}{CALL}", {"tools": [ADD]}),
    "cut off": ("1259 hello there", {"max_tokens": 2}),
    "cut off in a call": (CALL, {"tools": [ADD], "tool_choice": "required", "max_tokens": 5}),
    "a function": (CALL, {"functions": [ADD["function"]]}),
    "usage": ("1259", {"stream_options": {"include_usage": True}}),
    "JSON": ('{"a": 1}', {"response_format": {"type": "json_object"}}),
    "stop text": ("one, two", {"stop": [","]}),
    "bookkeeping": ("1259", {"user": "me", "store": True, "metadata": {"a": "b"}}),
}
RESPONSES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"says {name}": (said, {"tools": [FLAT]}) for name, said in ANSWERS.items()},
    "log-probs": ("zwölf 你好 🙂!", TEXT_LOGPROBS),
    "log-probs around a call": (f"I add.\n{CALL}", {**TEXT_LOGPROBS, "tools": [FLAT]}),
    "thinking": (f"{THOUGHT}1259", {**TEXT_LOGPROBS, "reasoning": {"effort": "low"}}),
    "thinking before a call": (f"{THOUGHT}{CALL}", {"tools": [FLAT]}),
    "cut off": ("1259 hello there", {"max_output_tokens": 2, "truncation": "auto"}),
    "cut off in a call": (CALL, {"tools": [FLAT], "tool_choice": "required", "max_output_tokens": 5}),
    "a custom tool": (RUN, {"tools": [{"type": "custom", "name": "run"}]}),
    "allowed tools": (CALL, {"tools": [FLAT], "tool_choice": ALLOWED}),
    "JSON": ('{"a": 1}', {"text": FORMAT}),
    "bookkeeping": ("1259", {"user": "me", "store": False, "metadata": {"a": "b"}, "instructions": "be brief"}),
}
COMPLETIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("1259", {}),
    "log-probs": ("zwölf 你好!", {"logprobs": 3}),
    "several choices": ("1259", {"n": 2, "logprobs": 0}),
    "cut off": ("1259 hello there", {"max_tokens": 2}),
    "token ids": ("1259", {"prompt": [5, 6, 7]}),
}


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **SCHEMAS})


def check(name: str, value: Any) -> None:
    error = jsonschema.exceptions.best_match(validator(name).iter_errors(value))
    assert error is None, f"{error.message[:300]} at {list(error.absolute_path)}"


@pytest.fixture
async def ask(start_proxy, engine, tokenizer):
    """A session's routes, of a model that thinks."""
    engine.tokenizer = copy.deepcopy(tokenizer)
    engine.tokenizer.chat_template = TEMPLATE
    proxy = await start_proxy()
    session = proxy.open_session()

    async def post(route: str, **body: Any) -> Any:
        answer = await proxy.http_client.post(f"{session.base_url}/{route}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    return post


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("kind", CHAT)
async def test_chat_completions(ask, engine, kind):
    engine.answer, fields = CHAT[kind]
    whole = {name: value for name, value in fields.items() if name != "stream_options"}
    answer = (await ask("chat/completions", messages=[QUESTION], **whole)).json()
    check("CreateChatCompletionResponse", answer)
    ChatCompletion.model_validate(answer)
    chunks = events((await ask("chat/completions", messages=[QUESTION], stream=True, **fields)).text)
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
        ChatCompletionChunk.model_validate(chunk)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for expected in answer["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        said = "".join(choice["delta"].get("content") or "" for choice in mine)
        assert said == (expected["message"]["content"] or "")
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        told = [entry for choice in mine for entry in (choice["logprobs"] or {}).get("content", ())]
        assert told == ((expected["logprobs"] or {}).get("content") or [])


@pytest.mark.parametrize("kind", RESPONSES)
async def test_responses(ask, engine, kind):
    engine.answer, fields = RESPONSES[kind]
    answer = (await ask("responses", input=[QUESTION], model="m", **fields)).json()
    check("Response", answer)
    Response.model_validate(answer)
    told = events((await ask("responses", input=[QUESTION], model="m", stream=True, **fields)).text)
    for event in told:
        check(EVENTS[event["type"]], event)
        STREAM_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    last = told[-1]["response"]
    assert sorted(item["type"] for item in last["output"]) == sorted(item["type"] for item in answer["output"])
    said = [part for item in last["output"] for part in item.get("content", ())]
    assert said == [part for item in answer["output"] for part in item.get("content", ())]


@pytest.mark.parametrize("kind", COMPLETIONS)
async def test_completions(ask, engine, kind):
    engine.answer, fields = COMPLETIONS[kind]
    body = {"prompt": "Sort 5291", **fields}
    answer = (await ask("completions", **body)).json()
    check("CreateCompletionResponse", answer)
    Completion.model_validate(answer)
    chunks = events((await ask("completions", stream=True, **body)).text)
    for number, expected in enumerate(answer["choices"]):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == number]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        told = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [each for part in told for each in part[key]] == (expected["logprobs"] or {}).get(key, [])


async def test_a_custom_tool_is_called_in_chat_with_its_text(ask, engine):
    engine.answer = RUN
    answer = (await ask("chat/completions", messages=[QUESTION], tools=[RUN_NESTED])).json()
    check("CreateChatCompletionResponse", answer)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": "ls"})
