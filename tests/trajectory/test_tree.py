import json
from typing import Any

import pytest
from chat_tokenizers import PLAIN_STYLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.api.errors import ModelError, RequestError
from areal.trajectory import Renderer, export

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text or "", **more}


@pytest.mark.parametrize("style", PLAIN_STYLES)
def test_next_prompt_is_the_parents_ids_and_the_new_text(talk, style):
    chat = talk(style)
    first = chat.say([user("hello")], "an answer")
    messages = [user("hello"), assistant("an answer"), user("more")]
    prompt = chat.tree.prompt(messages)
    known = chat.tree.token_ids(first)
    assert prompt.parent == first.index
    assert prompt.extends
    assert prompt.ids[: len(known)] == known
    if style != "mistral":  # its template puts spaces around an answer that no sampled token wrote
        assert prompt.ids == chat.ids(chat.tree.renderer.render(messages, None))


@pytest.mark.parametrize("style", PLAIN_STYLES)
def test_end_token_appears_once_between_turns(talk, style):
    chat = talk(style)
    chat.say([user("hello")], "answer")
    prompt = chat.tree.prompt([user("hello"), assistant("answer"), user("more")])
    ends = prompt.ids.count(chat.end)
    rendered = chat.ids(chat.tree.renderer.render([user("hello"), assistant("answer"), user("more")], None))
    assert ends == rendered.count(chat.end)


@pytest.mark.parametrize("style", PLAIN_STYLES)
def test_sampled_ids_are_kept_where_their_text_would_tokenise_differently(talk, style):
    chat = talk(style)
    letters = [token for letter in "hello" for token in chat.ids(letter)]
    assert letters != chat.ids("hello")
    first = chat.say([user("say hello")], [*letters, chat.end])
    prompt = chat.tree.prompt([user("say hello"), assistant("hello"), user("again")])
    assert first.message["content"] == "hello"
    assert prompt.extends
    assert prompt.ids[: len(first.prompt_ids) + 6] == [*first.prompt_ids.tolist(), *letters, chat.end]


@pytest.mark.parametrize("style", PLAIN_STYLES)
def test_truncated_answer_is_closed_by_the_template(talk, style):
    chat = talk(style)
    first = chat.say([user("hello")], chat.ids("cut of"), stop_reason="length")
    prompt = chat.tree.prompt([user("hello"), assistant("cut of"), user("go on")])
    after = prompt.ids[len(chat.tree.token_ids(first)) :]
    assert first.truncated
    assert first.end_id is None
    assert prompt.extends
    assert after.count(chat.end) >= 1


@pytest.mark.parametrize("style", ["llama3", "gemma"])
def test_white_space_that_a_template_trims_stays_as_sampled(talk, style):
    chat = talk(style)
    first = chat.say([user("hello")], "  padded \n")
    assert first.message["content"] == "  padded \n"
    prompt = chat.tree.prompt([user("hello"), assistant("  padded \n"), user("more")])
    known = chat.tree.token_ids(first)
    assert prompt.extends
    assert prompt.ids[: len(known)] == known


def test_template_that_drops_thinking_starts_a_counted_branch(talk):
    chat = talk("qwen3")
    answer = "<think>\nhm\n</think>\n\n12"
    first = chat.say([user("hello")], answer)
    messages = [user("hello"), assistant(answer), user("more")]
    second = chat.say(messages, "fine")
    assert second.parent == first.index
    assert not second.extends
    assert second.prompt_ids.tolist() == chat.ids(chat.tree.renderer.render(messages, None))
    assert chat.tree.rewrites == 1


def test_thinking_that_the_template_keeps_is_no_rewrite(talk):
    chat = talk("qwen3")
    answer = "<think>\nhm\n</think>\n\n12"
    first = chat.say([user("hello")], answer)
    second = chat.say([user("hello"), assistant(answer), {"role": "tool", "content": "3"}], "fine")
    assert second.extends
    assert second.parent == first.index
    assert chat.tree.rewrites == 0


def test_branch_after_a_rewrite_is_extended_in_turn(talk):
    chat = talk("qwen3")
    answer = "<think>\nhm\n</think>\n\n12"
    chat.say([user("a")], answer)
    second = chat.say([user("a"), assistant(answer), user("b")], "plain")
    third = chat.say([user("a"), assistant(answer), user("b"), assistant("plain"), user("c")], "end")
    assert third.parent == second.index
    assert third.extends
    assert chat.tree.rewrites == 1


@pytest.mark.parametrize(
    "spelled",
    [
        CALL,
        '<tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>',
        'thinking\n\n<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>',
    ],
)
def test_tool_call_keeps_the_models_spelling(talk, spelled):
    chat = talk("chatml")
    first = chat.say([user("1+2")], spelled, tools=TOOLS)
    (call,) = first.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    back = assistant(first.message["content"], tool_calls=[call])
    result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    prompt = chat.tree.prompt([user("1+2"), back, result], TOOLS)
    known = chat.tree.token_ids(first)
    assert prompt.extends
    assert prompt.ids[: len(known)] == known
    assert chat.tree.renderer.decode(prompt.ids[len(known) :]) == (
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turn_is_recognised_however_the_client_spells_it(talk):
    chat = talk("chatml")
    first = chat.say([user("1+2")], CALL, tools=TOOLS)
    arguments = json.loads('{"b": 2, "a": 1}')
    call = {"type": "function", "function": {"arguments": arguments, "name": "add"}, "id": "another id"}
    back = {"tool_calls": [call], "content": "", "role": "assistant", "name": "agent"}
    prompt = chat.tree.prompt(
        [user("1+2"), back, {"role": "tool", "content": "3", "tool_call_id": "another id"}], TOOLS
    )
    assert prompt.parent == first.index
    assert prompt.extends


@pytest.mark.parametrize(
    "changed",
    [
        [user("other"), assistant("answer"), user("more")],
        [user("hello"), assistant("answer!"), user("more")],
        [{"role": "system", "content": "s"}, user("hello"), assistant("answer"), user("more")],
        [user("hello"), user("more")],
    ],
)
def test_conversation_that_says_something_else_continues_nothing(talk, changed):
    chat = talk("chatml")
    chat.say([user("hello")], "answer")
    prompt = chat.tree.prompt(changed)
    assert prompt.parent is None
    assert prompt.ids == chat.ids(chat.tree.renderer.render(changed, None))


def test_argument_that_only_python_takes_for_the_same_is_another(talk):
    chat = talk("chatml")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": [true]}}\n</tool_call>'
    first = chat.say([user("q")], call, tools=TOOLS)
    result = {"role": "tool", "content": "3", "tool_call_id": first.message["tool_calls"][0]["id"]}
    chat.say([user("q"), first.message, result], "done", tools=TOOLS)
    for arguments, parent in (({"a": [True]}, first.index), ({"a": [1]}, None)):
        function = {"name": "add", "arguments": arguments}
        changed = {**first.message, "tool_calls": [{**first.message["tool_calls"][0], "function": function}]}
        assert chat.tree.prompt([user("q"), changed, result], TOOLS).parent == parent


def test_call_with_a_number_beyond_64_bits_goes_on(talk):
    chat = talk("chatml")
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": {10**30}}}}}\n</tool_call>'
    first = chat.say([user("q")], call, tools=TOOLS)
    result = {"role": "tool", "content": "3", "tool_call_id": first.message["tool_calls"][0]["id"]}
    second = chat.say([user("q"), first.message, result], "done", tools=TOOLS)
    third = chat.say([user("q"), first.message, result, second.message, user("more")], "done", tools=TOOLS)
    assert (second.parent, third.parent) == (first.index, second.index)


def test_other_tools_start_a_branch_of_the_same_conversation(talk):
    chat = talk("chatml")
    first = chat.say([user("hello")], "answer")
    prompt = chat.tree.prompt([user("hello"), assistant("answer"), user("more")], TOOLS)
    assert prompt.parent == first.index
    assert not prompt.extends


def test_deepest_recorded_turn_is_the_parent(talk):
    chat = talk("chatml")
    chat.say([user("a")], "1")
    second = chat.say([user("a"), assistant("1"), user("b")], "2")
    prompt = chat.tree.prompt([user("a"), assistant("1"), user("b"), assistant("2"), user("c")])
    assert prompt.parent == second.index


def test_unrecorded_turn_after_a_recorded_one_is_rendered(talk):
    chat = talk("chatml")
    first = chat.say([user("a")], "1")
    messages = [user("a"), assistant("1"), user("b"), assistant("by hand"), user("c")]
    prompt = chat.tree.prompt(messages)
    assert prompt.parent == first.index
    assert prompt.ids == chat.ids(chat.tree.renderer.render(messages, None))


def test_of_equal_siblings_the_one_whose_call_ids_come_back_is_the_parent(talk):
    chat = talk("chatml")
    siblings = [chat.say([user("1+2")], CALL, tools=TOOLS, choice=choice) for choice in range(3)]
    for sibling in siblings:
        call_id = sibling.message["tool_calls"][0]["id"]
        messages = [user("1+2"), sibling.message, {"role": "tool", "content": "3", "tool_call_id": call_id}]
        assert chat.tree.prompt(messages, TOOLS).parent == sibling.index


def test_of_siblings_that_nothing_tells_apart_the_latest_is_the_parent(talk):
    chat = talk("chatml")
    chat.say([user("a")], "1")
    latest = chat.say([user("a")], "1")
    assert chat.tree.prompt([user("a"), assistant("1"), user("b")]).parent == latest.index


def test_results_of_parallel_calls_are_told_apart_by_the_call_they_answer(talk):
    chat = talk("chatml")
    first = chat.say([user("twice")], CALL + "\n" + CALL, tools=TOOLS)
    one, two = (call["id"] for call in first.message["tool_calls"])

    def results(*ids: str) -> list[dict[str, Any]]:
        return [{"role": "tool", "content": "3", "tool_call_id": call_id} for call_id in ids]

    second = chat.say([user("twice"), first.message, *results(one, two)], "done", tools=TOOLS)
    same = chat.tree.prompt([user("twice"), first.message, *results(one, two), assistant("done"), user("x")], TOOLS)
    crossed = chat.tree.prompt([user("twice"), first.message, *results(two, one), assistant("done"), user("x")], TOOLS)
    assert same.parent == second.index
    assert crossed.parent == first.index


def test_stop_text_is_sampled_but_not_said(talk):
    chat = talk("chatml")
    ids = chat.ids("one###")
    first = chat.say([user("count")], ids, stop=("###",))
    assert first.message["content"] == "one"
    prompt = chat.tree.prompt([user("count"), assistant("one"), user("on")])
    assert prompt.extends
    assert prompt.ids[len(first.prompt_ids) :][: len(ids) + 1] == [*ids, chat.end]


def test_prefix_is_stored_once(talk):
    chat = talk("chatml")
    messages = [user("begin")]
    for turn in range(30):
        chat.say(messages, f"answer {turn}")
        messages = [*messages, assistant(f"answer {turn}"), user(f"question {turn}")]
    stored = sum(len(node.prompt_ids) + len(node.output_ids) for node in chat.tree.completions)
    assert stored == len(chat.tree.token_ids(chat.tree.completions[-1]))
    assert sum(len(node.messages) for node in chat.tree.completions) == 30


def test_asking_for_a_prompt_records_nothing(talk):
    chat = talk("chatml")
    chat.tree.prompt([user("hello")])
    assert chat.tree.last is None
    assert export(chat.tree, "individual", 1.0) == []


def test_refusal_of_the_template_is_the_callers_error(talk):
    chat = talk("chatml")
    with pytest.raises(RequestError, match="chat template refuses"):
        chat.tree.prompt([{"role": "user", "content": 7}])


def test_tokenizer_without_a_template_is_refused():
    class Bare:
        chat_template = None

    with pytest.raises(ModelError, match="chat template"):
        Renderer(Bare())


def test_turn_end_of_the_template_is_known(talk):
    for style in PLAIN_STYLES:
        chat = talk(style)
        assert chat.tree.renderer.turn_end_ids == [chat.end]


TEXT = st.text(st.sampled_from("helo an12\n</think>{é€"), max_size=8)


@pytest.mark.parametrize("style", PLAIN_STYLES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_hold_exactly_the_sampled_ids(talk, style, data):
    """Random trees of conversations, the model sampling random ids of the whole vocabulary."""
    chat = talk(style)
    size = len(chat.tree.renderer.tokenizer)
    paths: list[list[dict[str, Any]]] = [[]]
    sampled: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 6), "calls")):
        messages = [*data.draw(st.sampled_from(paths), "continues"), user(data.draw(TEXT, "question"))]
        output = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12), "output")
        stopped = data.draw(st.booleans(), "stopped")
        output = [*(token for token in output if token != chat.end), *([chat.end] if stopped else [])] or [0]
        node = chat.say(messages, output, stop_reason="stop" if stopped else "length")
        sampled.append(output)
        paths.append([*messages, assistant(node.message["content"])])
    for style_name in ("individual", "concat"):
        trained: dict[int, list[int]] = {}
        for row in export(chat.tree, style_name, 1.0):
            for index in sorted(set(row.completion_index[row.loss_mask].tolist())):
                assert index not in trained
                trained[index] = row.input_ids[row.completion_index == index].tolist()
        assert trained == dict(enumerate(sampled))
    for node in chat.tree.completions:
        (row,) = [row for row in export(chat.tree, "individual", 1.0) if row.completion_index.max() == node.index]
        assert row.input_ids.tolist() == chat.tree.token_ids(node)
