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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.dictionaries(st.text(max_size=5), JSON))))
def test_what_is_written_well_is_read_back(calls):
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies if "</tool_call>" not in body)
    assert parse(text)[1] == calls
