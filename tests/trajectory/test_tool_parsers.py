import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.trajectory.parsers import AnswerFormat, ParsedAnswer, ToolCall, choose, detect
from areal.trajectory.parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from areal.trajectory.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

PARSERS = sorted(TOOL_PARSERS)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def read(parser: str, text: str, tools: Any = ()) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    said = AnswerFormat(TOOL_PARSERS[parser]).read(text, tools)
    return said.content, [(call.name, call.arguments) for call in said.calls]


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def deepseek(*bodies: str) -> str:
    return CALLS_BEGIN + "\n".join(f"{CALL_BEGIN}{body}{CALL_END}" for body in bodies) + CALLS_END


FENCED = f'function{SEPARATOR}add\n```json\n{{"a": 1}}\n```'
BARE = f'add{SEPARATOR}{{"a": 1}}'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ADD = [tool("add", a={"type": "integer"})]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", hermes('{"name": "add", "arguments": {"a": 1}}')),
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>'),
        ("qwen3_coder", XML),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}'),
        ("llama3", '{"type": "function", "name": "add", "parameters": {"a": 1}}'),
        ("llama3", '<|python_tag|>{"name": "add", "arguments": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abc456789"}]'),
        ("mistral_named", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc456789[ARGS]{"a": 1}'),
        ("mistral_named", '[TOOL_CALLS]add{"a": 1}'),
        ("deepseek", deepseek(FENCED)),
        ("deepseek", deepseek(BARE)),
        ("deepseek_bare", deepseek(BARE)),
        ("deepseek", deepseek(FENCED).removesuffix(CALLS_END)),
    ],
)
def test_call_is_read(parser, text):
    assert read(parser, text, ADD) == ("", [("add", {"a": 1})])
    if parser != "llama3":  # there a call is at the beginning
        assert read(parser, f"Let me see.\n{text}", ADD) == ("Let me see.", [("add", {"a": 1})])


@pytest.mark.parametrize("parser", PARSERS)
def test_parallel_calls_keep_their_order(parser):
    syntax = TOOL_PARSERS[parser]
    calls = [ToolCall(f"f{number}", {"x": "y"}) for number in range(3)]
    assert AnswerFormat(syntax).read(syntax.render(calls), ()) == ParsedAnswer("", "", calls)


@pytest.mark.parametrize("parser", PARSERS)
def test_text_around_calls_is_on_lines_of_its_own(parser):
    block = TOOL_PARSERS[parser].render([ToolCall("f", {})])
    if parser == "llama3":
        assert read(parser, f"{block}\n\nafter") == ("after", [("f", {})])
    else:
        assert read(parser, f"before \n{block}\n\nafter") == ("before\nafter", [("f", {})])


@pytest.mark.parametrize("parser", PARSERS)
def test_without_tools_nothing_is_a_call(parser):
    block = TOOL_PARSERS[parser].render([ToolCall("f", {})])
    assert read(parser, block, None) == (block, [])


BAD_CALLS = [
    '{"name": "add", "arguments": {"a": 1}',
    '{"name": "add"}',
    '{"name": "add", "arguments": "{}"}',
    '{"name": "add", "arguments": null}',
    '{"name": "add", "arguments": {}, "more": 1}',
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    '{"name": "add", "arguments": {"a": 1, "a": 2}}',
    '{"name": "add", "arguments": {"a": "\\ud800"}}',
    '{"name": "add", "arguments": {"a": "line\nbreak"}}',
    "{'name': 'add', 'arguments': {}}",
    '["add", {}]',
    "add(1, 2)",
    "",
    "[" * 5000,
    '{"name": "add", "arguments": {"a": ' + "[" * 100_000,
]


@pytest.mark.parametrize("body", BAD_CALLS)
@pytest.mark.parametrize("parser", ["hermes", "llama3", "mistral"])
def test_malformed_json_call_stays_text(parser, body):
    text = {
        "hermes": f"before {hermes(body)} after",
        "llama3": body.replace('"arguments"', '"parameters"') + " after",
        "mistral": f"before [TOOL_CALLS] [{body}] after",
    }[parser]
    assert read(parser, text) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\nadd\n</tool_call>",
        XML.replace("</function>", "<parameter=a>\n2\n</parameter>\n</function>"),
        XML.removesuffix("</tool_call>"),
    ],
)
def test_malformed_tagged_call_stays_text(text):
    assert read("qwen3_coder", f"{text} after", ADD) == (f"{text} after", [])


@pytest.mark.parametrize(
    "text",
    [
        deepseek(FENCED.replace("}", "")),
        deepseek(f"{SEPARATOR}{{}}"),
        deepseek(FENCED.removesuffix("```")),
        deepseek(FENCED, "oops"),
        deepseek(FENCED).replace(CALL_END, ""),
        deepseek(),
        "[TOOL_CALLS]some words {}",
        "[TOOL_CALLS]add[ARGS][1]",
        "[TOOL_CALLS] []",
    ],
)
def test_other_malformed_calls_stay_text(text):
    parser = "mistral" if text.startswith("[") else "deepseek"
    assert read(parser, f"{text} after") == (f"{text} after", [])


@pytest.mark.parametrize("parser", PARSERS)
def test_call_that_was_cut_off_stays_text(parser):
    whole = TOOL_PARSERS[parser].render([ToolCall("add", {"a": "1"})])
    text = whole[:-1] if parser not in ("deepseek", "deepseek_bare") else whole.removesuffix(CALL_END + CALLS_END)
    assert read(parser, text) == (text, [])


def test_malformed_call_next_to_a_good_one_stays_text():
    text = '<tool_call>oops</tool_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read("hermes", text) == ("<tool_call>oops</tool_call>", [("add", {})])


def test_end_mark_inside_an_argument_is_an_argument():
    text = '<tool_call>{"name": "echo", "arguments": {"text": "</tool_call> <tool_call>"}}</tool_call>'
    assert read("hermes", text) == ("", [("echo", {"text": "</tool_call> <tool_call>"})])


@pytest.mark.parametrize(
    "text", ['{"answer": 3}', '{"name": "Bob", "age": 3} is JSON', 'See {"name": "f", "parameters": {}}']
)
def test_json_that_is_no_call_is_an_answer(text):
    assert read("llama3", text) == (text, [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "\n a\nb \n", "\n a\nb \n"),
        ({}, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_tagged_value_has_the_type_that_the_schema_declares(schema, text, value):
    offered = tool("f", **({} if schema is None else {"x": schema}))
    offered["function"]["parameters"]["$defs"] = {"Point": {"type": "object"}}
    call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3_coder", call, [offered]) == ("", [("f", {"x": value})])


@pytest.mark.parametrize("parser", PARSERS)
def test_what_a_syntax_cannot_say_is_not_written(parser):
    with pytest.raises(ValueError, match="must"):
        TOOL_PARSERS[parser].render([ToolCall('a"<b>\n{', {})])


def test_value_that_would_end_its_tag_is_not_written():
    with pytest.raises(ValueError, match="must not hold"):
        TOOL_PARSERS["qwen3_coder"].render([ToolCall("f", {"x": "</parameter>"})])


THINK = REASONING_PARSERS["think"]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n12", "hm", "12"),
        ("  <think>hm</think>12\n", "hm", "12\n"),
        ("<think>\n\n</think>\n\n12", "", "12"),
        ("<think>\nnever done \n", "never done \n", ""),
        ("12", "", "12"),
        ("  12", "", "  12"),
        ("so <think>hm</think>", "", "so <think>hm</think>"),
        ("<thi", "", "<thi"),
    ],
)
def test_thinking_is_told_from_the_answer(text, reasoning, content):
    said = AnswerFormat(TOOL_PARSERS["hermes"], THINK).read(text, None)
    assert (said.reasoning, said.content) == (reasoning, content)


def test_thinking_that_the_prompt_opened():
    answers = AnswerFormat(TOOL_PARSERS["hermes"], THINK)
    assert answers.read("hm\n</think>\n\n12", None, thinking=True) == ParsedAnswer("12", "hm", [])
    assert answers.read("hm", None, thinking=True) == ParsedAnswer("", "hm", [])


def test_call_inside_thinking_is_a_thought():
    call = hermes('{"name": "add", "arguments": {}}')
    said = AnswerFormat(TOOL_PARSERS["hermes"], THINK).read(f"<think>{call}</think>{call}", ())
    assert said == ParsedAnswer("", call, [ToolCall("add", {})])


@pytest.mark.parametrize("name", ["think", "mistral"])
def test_prompt_that_opens_thinking_is_known(name):
    marks = REASONING_PARSERS[name]
    assert marks.opened_by(f"<assistant>{marks.open}\n")
    assert not marks.opened_by(f"<assistant>{marks.open}\n\n{marks.close}\n\n")


NAMES = st.sampled_from(["add", "lookup_2", "a.b-c", "é"])
WORDS = st.text(max_size=9)
VALUES = st.none() | st.booleans() | st.integers() | WORDS | st.lists(st.integers() | WORDS, max_size=3)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALLS = st.lists(st.builds(ToolCall, NAMES, ARGUMENTS), min_size=1, max_size=3)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="<>\n"), min_size=1, max_size=5)
TAGGED = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(KEYS, st.text(st.characters(codec="utf-8")), max_size=3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
def test_what_is_written_well_is_read_back(parser, data):
    calls = data.draw(TAGGED if parser == "qwen3_coder" else CALLS)
    syntax = TOOL_PARSERS[parser]
    assert AnswerFormat(syntax).read(syntax.render(calls), ()) == ParsedAnswer("", "", calls)


@given(NAMES, st.dictionaries(st.sampled_from(["s", "i", "n", "b", "l", "o"]), st.integers(), max_size=6))
def test_tagged_values_of_every_type_are_read_back(name, chosen):
    values = {
        "s": ("string", "3"),
        "i": ("integer", 3),
        "n": ("number", 2.5),
        "b": ("boolean", True),
        "l": ("array", ["a", {"b": None}]),
        "o": ("object", {"k": "</x>"}),
    }
    tools = [tool(name, **{key: {"type": kind} for key, (kind, _) in values.items()})]
    call = ToolCall(name, {key: values[key][1] for key in chosen})
    syntax = TOOL_PARSERS["qwen3_coder"]
    assert AnswerFormat(syntax).read(syntax.render([call]), tools).calls == [call]


@pytest.mark.parametrize("parser", ["mistral", "mistral_named"])
def test_id_that_the_model_wrote_is_read_back(parser):
    syntax = TOOL_PARSERS[parser]
    calls = [ToolCall("add", {"a": 1}, "abcdefgh1"), ToolCall("add", {}, "abcdefgh2")]
    assert AnswerFormat(syntax).read(syntax.render(calls), ()).calls == calls


def pieces_of(parser: str) -> st.SearchStrategy[str]:
    """What answers are made of: marks whole and in part, calls whole and broken, and words."""
    syntax = TOOL_PARSERS[parser]
    whole = syntax.render([ToolCall("add", {"a": "1"})])
    marks = [*syntax.marks, *syntax.closers, "<think>", "</think>", "{", "}", ";", "[", "]", '"', "\\", "\n", " "]
    parts = st.tuples(st.just(whole), st.integers(0, len(whole)), st.integers(0, len(whole)))
    return st.sampled_from([*marks, "word", whole, whole]) | parts.map(lambda cut: cut[0][cut[1] : cut[2]])


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stream_says_the_same_however_it_is_cut(parser, data):
    text = "".join(data.draw(st.lists(pieces_of(parser), max_size=7), "pieces"))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), "cuts"))
    thinking = data.draw(st.booleans(), "thinking")
    answers = AnswerFormat(TOOL_PARSERS[parser], data.draw(st.sampled_from([None, THINK]), "marks"))
    whole = answers.read(text, (), thinking=thinking)
    for ends in (cuts, range(len(text) + 1)):
        reader = answers.reader((), thinking=thinking)
        events, begin = [], 0
        for end in [*ends, len(text)]:
            events += reader.feed(text[begin:end])
            begin = end
        assert ParsedAnswer.of([*events, *reader.finish()]) == whole


@pytest.mark.parametrize("parser", PARSERS)
def test_stream_holds_back_marks_and_calls_only(parser):
    answers = AnswerFormat(TOOL_PARSERS[parser], THINK)
    block = answers.calls.render([ToolCall("f", {"x": "y"})])
    reader = answers.reader(())
    said = [event for letter in "plain words" for event in reader.feed(letter)]
    assert ParsedAnswer.of(said).content == "plain words"
    during = [event for letter in block for event in reader.feed(letter)]
    if parser != "llama3":
        assert ParsedAnswer.of(during).content == ""
    assert ParsedAnswer.of([*during, *reader.finish()]).calls == (
        [] if parser == "llama3" else [ToolCall("f", {"x": "y"})]
    )


def test_text_that_only_looks_like_a_call_is_not_held_back():
    reader = AnswerFormat(TOOL_PARSERS["hermes"]).reader(())
    assert (
        ParsedAnswer.of(reader.feed("<tool_call> is a tag. ") + reader.feed("More")).content
        == "<tool_call> is a tag. More"
    )
    reader = AnswerFormat(TOOL_PARSERS["llama3"]).reader(())
    assert ParsedAnswer.of(reader.feed('{"answer": ') + reader.feed('"long')).content == '{"answer": "long'


def test_long_call_is_read_in_linear_time():
    """Each piece is looked at once; reading it again for every piece would take minutes."""
    body = json.dumps({"name": "f", "arguments": {"x": "y" * 200_000}})
    reader = AnswerFormat(TOOL_PARSERS["hermes"]).reader(())
    text = hermes(body)
    events = [event for at in range(0, len(text), 4) for event in reader.feed(text[at : at + 4])]
    assert ParsedAnswer.of(events).calls[0].name == "f"


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<|im_start|>{{ message.content }}", "hermes", None),
        ('<tool_call>{"name": ..., "parameters": }', "hermes", None),
        ("<tool_call><function=x>", "qwen3_coder", None),
        ("<tool_call> <think></think>", "hermes", "think"),
        ('{"name": function name, "parameters": dictionary}', "llama3", None),
        ("<|python_tag|>", "llama3", None),
        ("[TOOL_CALLS] [", "mistral", None),
        ("[TOOL_CALLS]name[ARGS] [THINK][/THINK]", "mistral_named", "mistral"),
        (f"{CALLS_BEGIN}function```json</think>", "deepseek", "think"),
        (f"{CALLS_BEGIN}", "deepseek_bare", None),
        ({"default": "x", "tool_use": "[TOOL_CALLS]"}, "mistral", None),
    ],
)
def test_parsers_are_read_off_the_template(template, calls, reasoning):
    found = detect(template)
    assert found.calls.name == calls
    assert (found.reasoning.name if found.reasoning else None) == reasoning


def test_parsers_can_be_named():
    chosen = choose("<tool_call></think>", tool_parser="llama3", reasoning_parser="none")
    assert chosen.calls.name == "llama3"
    assert chosen.reasoning is None
    assert choose("x", reasoning_parser="think").reasoning == THINK


@pytest.mark.parametrize("names", [{"tool_parser": "gpt"}, {"reasoning_parser": "gpt"}])
def test_unknown_parser_is_refused_with_the_choices(names):
    with pytest.raises(ValueError, match=r"must be one of .*(hermes|think).*, got 'gpt'"):
        choose("x", **names)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_what_is_cut_off_in_a_call_is_nothing_wherever_it_is_cut(name):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = [ToolCall("add", {"a": "1"}), ToolCall("add", {"b": "<x>"})]
    format = AnswerFormat(TOOL_PARSERS[name])
    text = TOOL_PARSERS[name].render(calls)
    for end in range(1, len(text)):
        whole = format.read(text[:end], tools, cut=True)
        assert whole.content.strip() == "", text[:end]
        assert [call.arguments for call in whole.calls] == [call.arguments for call in calls[: len(whole.calls)]]
        reader = format.reader(tools)
        streamed = [event for character in text[:end] for event in reader.feed(character)]
        assert ParsedAnswer.of([*streamed, *reader.finish(cut=True)]) == whole
    said = f"I will add. {text[: len(text) - 1]}"
    if not TOOL_PARSERS[name].bare:
        assert format.read(said, tools, cut=True).content.strip() == "I will add."
