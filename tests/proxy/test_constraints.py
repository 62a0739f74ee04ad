"""What a request demands of its answer holds for any answer that can be drawn, in every syntax of tool calls."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from areal.api.errors import RequestError
from areal.api.io_struct import Grammar
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.grammar import GrammarCompiler, GrammarState
from areal.proxy.constraints import Constraints, constrain
from areal.proxy.errors import ApiError
from areal.proxy.json_schema import MAX_NUMBER, narrow
from areal.proxy.types import Call
from areal.trajectory.parsers import AnswerFormat, ParsedAnswer, ToolCall
from areal.trajectory.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

pytestmark = pytest.mark.slow  # a grammar is first tried in a process of its own

END = 2
THINKING = REASONING_PARSERS["think"]
MARKS = [
    *("<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
]
CHAIN = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}},
    "required": ["node"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}
WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "°F"]},
        "days": {"type": "integer", "minimum": 1},
        "wind": {"type": "number"},
        "hours": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["unit", "days"],
}


def tool(name: str, parameters: dict[str, Any] | None = None, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


TOOLS = [tool("get_weather", WEATHER), tool("now"), tool("follow-chain", CHAIN, strict=True)]
CALLS = [
    ToolCall("get_weather", {"unit": "°F", "days": 3, "wind": 1.5}),
    ToolCall("now", {}),
    ToolCall("follow-chain", {"node": {"value": True, "next": None}}),
]


class Model:
    """Draws any token that it may, and is no cleverer than that."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.tokenizer = make_tokenizer(["a"], 261, 4096)
        self.tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        self.added = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        self._grammars = GrammarCompiler(self.tokenizer, len(self.tokenizer))

    def begin(self, grammar: Grammar | None) -> GrammarState:
        assert grammar is not None
        return self._grammars.begin_now(grammar)

    def draw(self, grammar: Grammar | None, seed: int, limit: int = 1500) -> str | None:
        """A finished answer; None if it had to be cut off."""
        state, rng, ids = self.begin(grammar), random.Random(seed), list[int]()
        while len(ids) < limit:
            token = rng.choice(np.flatnonzero(state.allowed([END])).tolist())
            if token == END:
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            ids.append(token)
            state.advance(token)
        return None

    def accepts(self, grammar: Grammar | None, text: str) -> bool:
        state = self.begin(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed([END])[token]:
                return False
            state.advance(token)
        return state.may_end


@cache
def model(marked: bool = True) -> Model:
    """`marked` = marks are tokens of their own; else they are spelled out, but for those of the built-in tokenizer."""
    return Model(tuple(MARKS) if marked else ())


def ask(**wanted: Any) -> Call:
    return Call(messages=[], **wanted)


def check_calls(said: ParsedAnswer, tools: list[dict[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    for call in said.calls:
        jsonschema.validate(call.arguments, schemas[call.name])


@pytest.fixture(params=TOOL_PARSERS)
def answers(request: pytest.FixtureRequest) -> AnswerFormat:
    return AnswerFormat(TOOL_PARSERS[request.param])


HERMES = AnswerFormat(TOOL_PARSERS["hermes"])


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_made_whatever_is_drawn(answers: AnswerFormat, parallel: bool, marked: bool) -> None:
    chooser = model(marked)
    grammar = constrain(ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel), answers, chooser.added)
    texts = [chooser.draw(grammar, seed) for seed in range(12)]
    finished = [text for text in texts if text is not None]
    assert finished
    for text in finished:
        said = answers.read(text, TOOLS)
        assert said.content == ""
        assert said.calls if parallel else len(said.calls) == 1
        check_calls(said, TOOLS)


@pytest.mark.parametrize("marked", [True, False])
def test_calls_as_the_model_writes_them_are_allowed(answers: AnswerFormat, marked: bool) -> None:
    chooser = model(marked)
    several = constrain(ask(tools=TOOLS, tool_choice="required"), answers, chooser.added)
    one = constrain(ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), answers, chooser.added)
    mixed = constrain(ask(tools=TOOLS), answers, chooser.added)
    for calls in ([CALLS[0]], CALLS, [CALLS[1], CALLS[1]]):
        text = answers.calls.render(calls)
        assert chooser.accepts(several, text)
        assert chooser.accepts(mixed, text)
        assert chooser.accepts(one, text) == (len(calls) == 1)
    assert not chooser.accepts(several, "No.")
    assert chooser.accepts(mixed, "No.")
    assert chooser.accepts(mixed, "")


def test_a_named_tool_is_the_only_one(answers: AnswerFormat) -> None:
    call = ask(tools=TOOLS, tool_choice="required", forced_tool="now")
    grammar = constrain(call, answers, model().added)
    assert model().accepts(grammar, answers.calls.render([CALLS[1]]))
    assert not model().accepts(grammar, answers.calls.render([CALLS[0]]))


@pytest.mark.parametrize("marked", [True, False])
def test_a_strict_tool_binds_a_call_that_begins_and_leaves_text_free(answers: AnswerFormat, marked: bool) -> None:
    chooser = model(marked)
    grammar = constrain(ask(tools=TOOLS), answers, chooser.added)
    whole = answers.calls.render([CALLS[2]])
    broken = answers.calls.render([ToolCall("follow-chain", {"node": 5})])
    assert not chooser.accepts(grammar, broken)
    if not answers.calls.bare:  # those are calls at the beginning of an answer only
        assert chooser.accepts(grammar, f"Let me see.\n{whole}")
        assert chooser.accepts(grammar, f"{whole}\nDone.")
        assert not chooser.accepts(grammar, f"Let me see.\n{broken}")


def test_a_spelled_mark_opens_a_call_as_its_token_does() -> None:
    grammar = constrain(ask(tools=TOOLS), HERMES, model().added)
    state = model().begin(grammar)
    for character in "So: <tool_call>":
        (token,) = model().tokenizer.encode(character, add_special_tokens=False)
        assert state.allowed([END])[token]
        state.advance(token)
    allowed = np.flatnonzero(state.allowed([END])).tolist()
    assert [model().tokenizer.decode([token]) for token in allowed] == ["\n"]


def test_only_one_call_where_calls_have_no_end_to_stop_at() -> None:
    free = [tool("now")]
    for name, syntax in TOOL_PARSERS.items():
        grammar = constrain(ask(tools=free, parallel_tool_calls=False), AnswerFormat(syntax), model().added)
        if syntax.call_end is not None:
            assert grammar is None, name
        else:
            assert model().accepts(grammar, syntax.render([CALLS[1]])), name
            assert not model().accepts(grammar, syntax.render([CALLS[1], CALLS[1]])), name
            assert model().accepts(grammar, "It is late."), name


@pytest.mark.parametrize(
    "call",
    [ask(), ask(tools=[tool("now")]), ask(tools=[tool("now", strict=False)], parallel_tool_calls=False)],
)
def test_nothing_is_constrained_that_was_not_asked_for(call: Call) -> None:
    assert constrain(call, HERMES, model().added) is None


@pytest.mark.parametrize("thinking", [None, False, True])
def test_an_answer_is_json_of_the_wanted_schema(thinking: bool | None) -> None:
    """None = a model that does not think; True = its prompt has opened the thinking."""
    answers = HERMES if thinking is None else AnswerFormat(HERMES.calls, THINKING)
    call = ask(response_format={"type": "json_schema", "schema": WEATHER, "strict": True})
    grammar = constrain(call, answers, model().added, thinking=bool(thinking))
    for seed in range(10):
        text = model().draw(grammar, seed)
        if text is not None:
            said = answers.read(text, None, thinking=bool(thinking))
            jsonschema.validate(json.loads(said.content), WEATHER)
    plain = '{"unit": "C", "days": 2}'
    assert model().accepts(grammar, plain) == (thinking is not True)
    assert model().accepts(grammar, f"<think>\nHm.\n</think>\n\n{plain}") == (thinking is False)
    assert model().accepts(grammar, f"\nHm.\n</think>\n\n{plain}") == (thinking is True)
    assert not model().accepts(grammar, "warm")


def test_a_json_object_is_any_object() -> None:
    grammar = constrain(ask(response_format={"type": "json_object"}), HERMES, model().added)
    assert model().accepts(grammar, '{"a": [1, {"b": null}], "c": "d"}')
    assert model().accepts(grammar, "{}")
    assert not model().accepts(grammar, "[1]")
    assert all(isinstance(json.loads(text), dict) for text in (model().draw(grammar, s) for s in range(8)) if text)


def test_with_tools_to_choose_from_the_answer_is_json_or_calls(answers: AnswerFormat) -> None:
    city = {"$ref": "#/$defs/city", "$defs": {"city": {"type": "object", "properties": {"city": {"const": "Rome"}}}}}
    wanted = {"type": "json_schema", "schema": city, "strict": True}
    grammar = constrain(ask(tools=TOOLS, response_format=wanted), answers, model().added)
    assert model().accepts(grammar, '{"city": "Rome"}')
    assert not model().accepts(grammar, "Rome")
    for call in CALLS:
        assert model().accepts(grammar, answers.calls.render([call]))
    assert not model().accepts(grammar, answers.calls.render([ToolCall("follow-chain", {"node": 5})]))
    must = ask(tools=TOOLS, response_format=wanted, tool_choice="required")
    assert not model().accepts(constrain(must, answers, model().added), '{"city": "Rome"}')


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('{"a": 1}', True),
        ('{"a":1}', True),
        ('{\n    "a": 1\n}', True),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
    ],
)
def test_white_space_is_bounded(text: str, fine: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = constrain(ask(response_format={"type": "json_schema", "schema": schema}), HERMES, model().added)
    assert model().accepts(grammar, text) == fine


def test_a_schema_is_narrowed_never_widened() -> None:
    assert narrow({"type": "number"}) == {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
    for as_it_is in (
        {"type": "number", "minimum": 0},
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["b"]}]},
        {"const": {"type": "number"}, "enum": [{"properties": {}}]},
    ):
        assert narrow(as_it_is) == as_it_is
    assert narrow({"properties": {"type": {"type": "integer"}}}) == {
        "properties": {"type": {"type": "integer"}},
        "additionalProperties": False,
    }


def test_parts_of_an_intersection_keep_each_others_properties() -> None:
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    wanted = {"type": "json_schema", "schema": {"allOf": [base, more]}}
    assert model().accepts(constrain(ask(response_format=wanted), HERMES, model().added), '{"a": 1, "b": 2}')


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"not": {}}, {"items": {"format": "colour"}}])
def test_keywords_that_cannot_be_seen_to_are_refused_where_strict_and_left_out_where_not(keyword: Any) -> None:
    def grammar(strict: bool) -> Grammar | None:
        wanted = {"type": "json_schema", "schema": {"type": "array", **keyword}, "strict": strict}
        return constrain(ask(response_format=wanted, format_param="text.format"), HERMES, model().added)

    assert model().accepts(grammar(strict=False), "[1, 1]" if "items" not in keyword else '["red"]')
    with pytest.raises(RequestError, match=r"text\.format cannot be honoured: "):
        model().begin(grammar(strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ask(tool_choice="required"), "not among the tools"),
        (ask(tools=TOOLS, forced_tool="gone"), "'gone'"),
        (ask(tools=[tool('a"b')], tool_choice="required"), "cannot be called by this model"),
        (ask(tools=[tool("a", {"type": "array"})], tool_choice="required"), "must be a schema of type object"),
        (ask(response_format={"type": "json_schema", "schema": None}), "must be an object"),
    ],
)
def test_what_cannot_be_demanded_is_refused_by_name(call: Call, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refusal:
        constrain(call, HERMES, model().added)
    assert refusal.value.status == 400
    assert refusal.value.param is not None


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    call = ask(response_format={"type": "json_schema", "schema": schema})
    with pytest.raises(ApiError, match="nested too deeply"):
        constrain(call, HERMES, model().added)
    with pytest.raises(ApiError, match="nested too deeply"):
        Constraints(HERMES, model().added).of(call, thinking=False)


def test_texts_that_look_like_grammar_stay_texts() -> None:
    """A schema is the client's; nothing in it may become a rule of ours."""
    odd = 'x" | "y\n start: /.*/ <[2]> %json {} \\ / </tool_call> <|im_end|>'
    schema = {"type": "object", "properties": {odd: {"const": odd}}, "required": [odd]}
    grammar = constrain(ask(tools=[tool("odd", schema)], tool_choice="required"), HERMES, model().added)
    text = model().draw(grammar, 1)
    assert text is not None
    (call,) = HERMES.read(text, TOOLS).calls[:1]
    assert call.arguments == {odd: odd}


def test_equal_demands_have_one_grammar_and_others_their_own() -> None:
    constraints = Constraints(HERMES, model().added)
    first = constraints.of(ask(tools=TOOLS, tool_choice="required"), thinking=False)
    assert constraints.of(ask(tools=json.loads(json.dumps(TOOLS)), tool_choice="required"), thinking=False) is first
    others = [
        ask(tools=TOOLS),
        ask(tools=TOOLS[:2], tool_choice="required"),
        ask(tools=TOOLS, tool_choice="required", forced_tool="now"),
        ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
        ask(tools=TOOLS, response_format={"type": "json_object"}),
    ]
    assert len({first, *(constraints.of(call, thinking=False) for call in others)}) == 6
    assert constraints.of(ask(), thinking=False) is None


def test_demands_of_long_ago_are_forgotten() -> None:
    constraints = Constraints(HERMES, model().added, remembered=1)
    one, two = (ask(tools=TOOLS, tool_choice="required", forced_tool=name) for name in ("now", "get_weather"))
    first = constraints.of(one, thinking=False)
    constraints.of(two, thinking=False)
    again = constraints.of(one, thinking=False)
    assert again == first
    assert again is not first
