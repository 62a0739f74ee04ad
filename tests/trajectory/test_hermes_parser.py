import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.trajectory.parsers.hermes import parse


def test_calls_and_the_text_before_them():
    text = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert parse(text) == ("Let me see.", [("add", {"a": 1})])


def test_parallel_calls_keep_their_order():
    text = "\n".join(f'<tool_call>\n{{"name": "f{i}", "arguments": {{}}}}\n</tool_call>' for i in range(3))
    assert parse(text) == ("", [("f0", {}), ("f1", {}), ("f2", {})])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add"}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": null}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '["add", {}]',
        "add(1, 2)",
        "",
        "[" * 5000,
    ],
)
def test_malformed_call_stays_text(body):
    text = f"before <tool_call>\n{body}\n</tool_call> after"
    assert parse(text) == (text, [])


def test_unfinished_call_stays_text():
    text = '<tool_call>\n{"name": "add", "arguments": {}}'
    assert parse(text) == (text, [])


def test_malformed_call_beside_a_good_one_stays_text():
    text = '<tool_call>oops</tool_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(text) == ("<tool_call>oops</tool_call>", [("add", {})])


def test_end_mark_inside_an_argument_is_an_argument():
    text = '<tool_call>{"name": "echo", "arguments": {"text": "</tool_call> <tool_call>"}}</tool_call>'
    assert parse(text) == ("", [("echo", {"text": "</tool_call> <tool_call>"})])


NAMES = st.sampled_from(["add", "lookup_2", "é"])
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.integers(), max_size=3)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3))
def test_what_is_written_well_is_read_back(calls):
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    text = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    assert parse(text) == ("", calls)
