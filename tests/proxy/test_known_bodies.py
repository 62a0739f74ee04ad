"""What is not parsed again is what was there: bodies read in part are read as if they were read whole."""

import json
from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.proxy.errors import ApiError
from areal.proxy.requests import MAX_KNOWN, WORTH_KNOWING, KnownBodies, parse_object

LONG = "word " * (WORTH_KNOWING // 5)
TRICKS = ('],"messages":[', "{", "\\", "0,")
VALUES = st.one_of(st.text(max_size=8), st.booleans(), st.integers(-1, 2), st.sampled_from(TRICKS))
MESSAGES = st.dictionaries(st.sampled_from(["role", "content", "n"]), VALUES, max_size=3)


def read(bodies: KnownBodies, raw: bytes) -> tuple[list[Any], dict[str, Any]]:
    """The messages and the rest, as an app reads them, each message standing for itself."""
    body, past = bodies.parse(raw, "messages")
    items = body.pop("messages")
    messages = [*past, *items]
    bodies.remember(raw, items, past, messages)
    return messages, body


def whole(raw: bytes) -> tuple[list[Any], dict[str, Any]]:
    body = parse_object(raw)
    return body.pop("messages"), body


def is_same(one: Any, other: Any) -> bool:
    """Unlike `==`, this tells True from 1."""
    return json.dumps(one) == json.dumps(other)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=3), min_size=1, max_size=6), st.data())
def test_growing_bodies_are_read_as_if_each_were_read_whole(turns: list[list[Any]], data: st.DataObject) -> None:
    bodies, messages = KnownBodies(), [{"role": "system", "content": LONG}]
    for turn in turns:
        messages = [*messages, *turn]
        if data.draw(st.booleans()):  # the client spells an earlier message differently, or leaves one out
            place = data.draw(st.integers(0, len(messages) - 1))
            messages = [*messages[:place], *data.draw(st.lists(MESSAGES, max_size=1)), *messages[place + 1 :]]
        others = data.draw(st.dictionaries(st.sampled_from(["model", "tools", "n"]), st.lists(MESSAGES, max_size=2)))
        body = {**others, "messages": messages or [{}]}
        if data.draw(st.booleans()):
            body = dict(reversed(body.items()))
        raw = orjson.dumps(body) if data.draw(st.booleans()) else json.dumps(body).encode()
        assert is_same(read(bodies, raw), whole(raw))
        assert bodies.digest(raw) == KnownBodies().digest(raw) == sha256(raw).digest()


def test_only_what_is_new_is_parsed() -> None:
    bodies = KnownBodies()
    messages: list[Any] = [{"role": "user", "content": LONG}]
    read(bodies, orjson.dumps({"messages": messages, "model": "any"}))
    messages += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]
    body, past = bodies.parse(orjson.dumps({"messages": messages, "model": "any"}), "messages")
    assert (past, body) == (messages[:1], {"messages": messages[1:], "model": "any"})


@pytest.mark.parametrize(
    "ending",
    [
        b',{"a":1}],"messages":[{"b":2}]}',  # a name that comes twice: the last counts
        b',{"a":1}],"messages":"none"}',
        b',{"a":1}]}]}',
        b',{"a":1}]',
        b",]}",
        b",}",
        b"," + b"[" * 200 + b"]" * 200 + b"]}",
    ],
)
def test_a_body_that_goes_on_differently_is_read_whole(ending: bytes) -> None:
    bodies = KnownBodies()
    beginning = b'{"messages":[' + orjson.dumps({"role": "user", "content": LONG})
    read(bodies, beginning + b"]}")
    assert outcome(bodies, beginning + ending) == outcome(KnownBodies(), beginning + ending)


def outcome(bodies: KnownBodies, raw: bytes) -> Any:
    try:
        return bodies.parse(raw, "messages")
    except ApiError as error:
        return error.message


def test_a_body_that_is_too_long_is_not_kept() -> None:
    bodies = KnownBodies()
    messages: list[Any] = [{"role": "user", "content": "x" * MAX_KNOWN}]
    read(bodies, orjson.dumps({"messages": messages}))
    _, past = bodies.parse(orjson.dumps({"messages": [*messages, {}]}), "messages")
    assert past == []
