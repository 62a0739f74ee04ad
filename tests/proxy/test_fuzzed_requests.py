"""Requests changed at random (benchmarks/fuzz.py), and those that were found by it: none may be answered 500."""

import json

import pytest
from conversations import BODIES, QUESTION

from areal.proxy.dialects import fields
from areal.proxy.dialects.base import MAX_DROPPED_NAMES
from areal.trajectory.parsers.qwen3_coder import declared_types
from benchmarks.fuzz import MARK, Mutator, fuzz

LONG = MARK * 5000
BROKEN_SCHEMAS = [
    {"required": [["a"]], "properties": {"a": {}}},
    {"required": [{}], "properties": {}},
    {"required": 1, "properties": {}},
    {"properties": 1},
    {"properties": []},
    {"properties": {"a": 1}},
    {"properties": {"a": {"type": 5}}},
    {"properties": {"a": {"type": [["string"]]}}},
    {"properties": {"a": {"anyOf": 3}}},
    {"properties": {"a": {"type": "string", "enum": 3}}},
    {"properties": {"a": {"$ref": 1}}},
]


@pytest.mark.slow
async def test_no_mutated_request_is_answered_500_or_repeated_at_length():
    report = await fuzz(400, seed=11)
    assert not report.failures, str(report)
    assert report.statuses.total() == 400
    assert {200, 400, 401} <= set(report.statuses)


def test_same_seed_sends_the_same_requests():
    one, two, other = [list(Mutator(seed).attacks(200)) for seed in (3, 3, 4)]
    assert one == two != other


@pytest.mark.slow
async def test_a_fault_is_found_and_shrunk(monkeypatch):
    """What the fuzzer reports if a field is read without a look at its kind."""
    monkeypatch.setattr(fields, "mapping", lambda body, name, where: body.get(name) or {})
    report = await fuzz(400, seed=11)
    assert report.statuses[500] > 0
    attack, _ = report.smallest
    assert len(attack.body) < 400
    assert f"seed {report.seed}" in str(report)
    assert repr(attack.body) in str(report)


@pytest.mark.parametrize("include", [1, True, {"a": 1}, [1], [["message.output_text.logprobs"]], 1.5])
async def test_include_must_be_a_list_of_texts(proxy, session, include):
    body = {"input": "Sort 5291", "include": include}
    answer = await proxy.http_client.post(f"{session.base_url}/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "include"


@pytest.mark.parametrize("include", [None, [], ["reasoning.encrypted_content"]])
async def test_include_may_name_what_is_there_anyway(proxy, session, include):
    body = {"input": "Sort 5291", "include": include}
    assert (await proxy.http_client.post(f"{session.base_url}/responses", json=body)).status_code == 200


def constrained(route, schema):
    """Requests that demand an answer or arguments of this schema."""
    if route == "messages":
        tool = {"name": "add", "input_schema": schema}
        return [
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"tools": [tool], "tool_choice": {"type": "any"}},
            {"tools": [tool]},
        ]
    function = {"name": "add", "parameters": schema, "strict": True}
    if route == "responses":
        return [
            {"text": {"format": {"type": "json_schema", "schema": schema, "name": "x"}}},
            {"tools": [{"type": "function", **function}]},
        ]
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "name": "x"}}},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {**function, "strict": False}}]},
    ]


@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder", "llama3"])
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("schema", BROKEN_SCHEMAS, ids=str)
async def test_schema_of_wrong_kinds_is_refused_by_name_where_it_is_followed(
    start_proxy, engine, route, schema, tool_parser
):
    proxy = await start_proxy(tool_parser=tool_parser)
    engine.answer = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    session = proxy.open_session()
    for changes in constrained(route, schema):
        answer = await proxy.http_client.post(f"{session.base_url}/{route}", json=BODIES[route] | changes)
        followed = "tools" not in changes or "tool_choice" in changes or "strict': True" in str(changes)
        assert answer.status_code == (400 if followed else 200), answer.text
        if followed:
            assert "of a schema in" in answer.text or "a schema in" in answer.text


async def test_required_next_to_another_type_is_an_old_habit_and_allowed(proxy, session):
    schema = {"type": "object", "properties": {"a": {"type": "string", "required": True}}}
    for changes in constrained("chat/completions", schema):
        body = BODIES["chat/completions"] | changes
        assert (await proxy.http_client.post(f"{session.base_url}/chat/completions", json=body)).status_code == 200


def test_schema_that_refers_to_itself_in_many_places_is_read_once():
    root = {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 300}}}
    assert declared_types(root["$defs"]["x"], root) <= {"string"}


@pytest.mark.parametrize(
    "content",
    [
        "[{'id': 'x', 'function': {'name': 'f', 'arguments': {'a': {1, 2}}}}]",
        "[{'id': 'x', 'function': {'name': 'f', 'arguments': {1: 2, 'a': 3}}}]",
        "[{'id': 'x', 'function': {'name': 'f', 'arguments': {'a': b'x'}}}]",
        "[{'id': 'x', 'function': {'name': '\\ud800', 'arguments': {}}}]",
        '[{"id": "x", "function": {"name": "\\ud800", "arguments": {}}}]',
    ],
)
async def test_calls_that_a_framework_wrote_as_text_may_be_no_json(proxy, session, content):
    messages = [QUESTION, {"role": "assistant", "content": content}, QUESTION]
    answer = await proxy.http_client.post(f"{session.base_url}/chat/completions", json={"messages": messages})
    assert answer.status_code == 200


def named(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}


LONG_INPUTS = [
    ("chat/completions", {"model": {LONG: 1}}),
    ("chat/completions", {LONG: LONG}),
    ("chat/completions", {"temperature": LONG}),
    ("chat/completions", {"n": LONG}),
    ("chat/completions", {"stream": LONG}),
    ("chat/completions", {"stop": [LONG, 1]}),
    ("chat/completions", {"messages": LONG}),
    ("chat/completions", {"messages": [{"role": LONG, "content": "x"}]}),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": LONG}]}]}),
    ("chat/completions", {"tools": [{"type": LONG}]}),
    (
        "chat/completions",
        {"tools": [named(LONG)], "tool_choice": {"type": "function", "function": {"name": LONG + "x"}}},
    ),
    ("chat/completions", {"tools": [named(LONG)], "tool_choice": "required"}),
    ("chat/completions", {"tools": [named("a")], "tool_choice": LONG}),
    ("chat/completions", {"stream_options": {LONG: 1}, "stream": True}),
    ("chat/completions", {"response_format": {"type": LONG}}),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": [LONG, 1]}}}}),
    ("responses", {"include": {LONG: LONG}}),
    ("responses", {"previous_response_id": LONG}),
    ("responses", {"input": [{"type": LONG}]}),
    ("responses", {"input": [{"role": LONG}]}),
    ("responses", {"text": {"format": {"type": LONG}}}),
    ("messages", {"messages": [{"role": LONG}]}),
    ("messages", {"messages": [{"role": "assistant", "content": [{"type": LONG}]}]}),
    ("messages", {"tool_choice": {"type": LONG}}),
    ("messages", {"output_config": {"format": {"type": LONG}}}),
    ("messages", {"output_config": {LONG: LONG}}),
    ("messages", {"tools": [{"type": LONG}]}),
]


@pytest.mark.parametrize(("route", "changes"), LONG_INPUTS, ids=lambda value: str(value)[:60].replace(MARK, ""))
async def test_errors_repeat_at_most_200_characters(proxy, session, route, changes):
    body = json.dumps(BODIES[route] | changes, ensure_ascii=False).encode()
    answer = await proxy.http_client.post(f"{session.base_url}/{route}", content=body)
    assert answer.status_code == 400
    assert answer.text.count(MARK) <= 200
    assert len(answer.text) < 800


async def test_session_routes_repeat_at_most_200_characters(proxy):
    admin = {"authorization": f"Bearer {proxy.admin_key}"}
    opened = (await proxy.http_client.post(f"{proxy.origin}/sessions", headers=admin)).json()
    await proxy.http_client.post(f"{opened['base_url']}/responses", json={"input": "hi"})
    refused = [
        await proxy.http_client.post(f"{proxy.origin}/sessions", headers=admin, json={LONG: LONG}),
        *[
            await proxy.http_client.post(
                f"{proxy.origin}/sessions/{opened['session_id']}/reward", headers=admin, json=body
            )
            for body in ({LONG: LONG}, {"reward": LONG}, {"reward": {LONG: 1}}, {"reward": [LONG]})
        ],
    ]
    for answer in refused:
        assert answer.status_code == 400
        assert answer.text.count(MARK) <= 200


@pytest.mark.slow
async def test_grammar_and_template_errors_repeat_at_most_200_characters(start_proxy, engine):
    engine._constrained = True
    proxy = await start_proxy()
    session = proxy.open_session()
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "format": LONG}, "strict": True}}
    body = {"messages": [QUESTION], "response_format": wanted}
    answer = await proxy.http_client.post(f"{session.base_url}/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.text.count(MARK) <= 200
    assert answer.json()["error"]["param"] == "response_format"


async def test_idempotency_key_in_an_error_is_shortened(proxy, session):
    url, headers = f"{session.base_url}/chat/completions", {"idempotency-key": "k" * 5000}
    await proxy.http_client.post(url, json=BODIES["chat/completions"], headers=headers)
    again = await proxy.http_client.post(url, json={"messages": [QUESTION, QUESTION]}, headers=headers)
    assert again.status_code == 409
    assert again.text.count("k") <= 220


async def test_made_up_parameters_do_not_fill_the_log(start_proxy, caplog):
    proxy = await start_proxy(drop_params=True)
    session = proxy.open_session()
    body = BODIES["chat/completions"] | {f"made_up_{number}{LONG}": 1 for number in range(MAX_DROPPED_NAMES + 50)}
    with caplog.at_level("WARNING", logger="areal"):
        answer = await proxy.http_client.post(f"{session.base_url}/chat/completions", json=body)
    assert answer.status_code == 200
    assert len(caplog.records) <= MAX_DROPPED_NAMES
    assert all(len(record.getMessage()) < 300 for record in caplog.records)
