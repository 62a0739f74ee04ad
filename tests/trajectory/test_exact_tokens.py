"""Random conversations over every template: what the model is given and trained on is exactly what was sampled."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from chat_tokenizers import STYLES
from client_spellings import EDITS, SPELLINGS, TOOLS, WORDS, answers_of, as_it_is
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from areal.api.errors import RequestError
from areal.trajectory import export
from areal.trajectory.tree import Completion

random_talks = settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass
class Thread:
    """A client's conversation as it would send it, and the completions it truly continues."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    truth: list[Completion] = field(default_factory=list)

    def then(self, chat: Any, node: Completion, asked: list[dict[str, Any]], spell: Any) -> "Thread":
        answers = chat.tree.renderer.format
        return Thread([*self.messages, *asked, spell(node.message, answers)], [*self.truth, node])

    def edited(self, edit: Any) -> "Thread":
        """Its last answer changed: from there on it is the client's invention."""
        return Thread([*self.messages[:-1], edit(self.messages[-1])], self.truth[:-1])


def next_messages(data: st.DataObject, style: str, thread: Thread) -> list[dict[str, Any]]:
    calls = thread.messages[-1].get("tool_calls", ()) if thread.messages else ()
    if calls and STYLES[style].calls is not None:
        return [{"role": "tool", "content": data.draw(WORDS), "tool_call_id": call["id"]} for call in calls]
    return [{"role": "user", "content": data.draw(WORDS, "question")}]


def same_tokens(chat: Any, one: Completion, other: Completion) -> bool:
    return chat.tree.token_ids(one) == chat.tree.token_ids(other)


def check_prompt(chat: Any, thread: Thread, messages: list[dict[str, Any]], tools: Any) -> None:
    """What must hold of every prompt, whatever came before it."""
    tree = chat.tree
    prompt = tree.prompt(messages, tools)
    assert prompt.ids[len(prompt.ids) - len(prompt.new_ids) :] == prompt.new_ids
    if prompt.parent is None:
        assert prompt.ids == chat.ids(tree.renderer.render(messages, tools))
        return
    parent = tree.completions[prompt.parent]
    # never mis-attributed: the parent is one that this client continues, or one of the very same tokens
    assert any(same_tokens(chat, parent, node) for node in thread.truth)
    known = tree.token_ids(parent)
    if prompt.extends:
        assert prompt.ids == [*known, *prompt.new_ids]
    else:
        assert prompt.new_ids == prompt.ids


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@random_talks
@given(data=st.data())
def test_conversations_are_recognised_and_never_misattributed(talk, style, data):
    chat = talk(style)
    threads = [Thread()]
    for _ in range(data.draw(st.integers(1, 7), "calls")):
        thread = data.draw(st.sampled_from(threads), "continues")
        if thread.truth and data.draw(st.integers(0, 4), "edit") == 0:
            thread = thread.edited(data.draw(st.sampled_from(EDITS)))
        tools = data.draw(st.sampled_from([None, TOOLS]), "tools")
        asked = next_messages(data, style, thread)
        text, finished = data.draw(answers_of(style, tools is not None), "answer")
        ids = [*chat.ids(text), chat.end] if finished else chat.ids(text) or [0]
        try:
            check_prompt(chat, thread, [*thread.messages, *asked], tools)
        except RequestError:
            continue  # templates have rules of their own
        node = chat.say([*thread.messages, *asked], ids, stop_reason="stop" if finished else "length", tools=tools)
        assert node.output_ids.tolist() == ids
        assert node.truncated == (not finished)
        threads.append(thread.then(chat, node, asked, data.draw(st.sampled_from(SPELLINGS), "spelling")))
    check_rows(chat)


def check_rows(chat: Any) -> None:
    """Both styles hold each sampled token once, after the ids that it was sampled after."""
    tree = chat.tree
    described = []
    for style in ("individual", "concat"):
        trained: dict[int, Any] = {}
        for row in export(tree, style, 0.9):
            for index in sorted(set(row.completion_index[row.loss_mask].tolist())):
                assert index not in trained
                here = row.completion_index == index
                begin = int(here.argmax())
                trained[index] = [row.input_ids[:begin].tolist()] + [
                    getattr(row, name)[here].tolist()
                    for name in ("input_ids", "logprobs", "versions", "returns", "temperatures")
                ]
        described.append(trained)
    assert described[0] == described[1]
    assert sorted(described[0]) == [node.index for node in tree.completions]
    for node in tree.completions:
        before, sampled, *_ = described[0][node.index]
        assert sampled == node.output_ids.tolist()
        assert before == tree.token_ids(node)[: -len(sampled)]


@pytest.mark.slow
@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda spell: spell.__name__)
@pytest.mark.parametrize("style", STYLES)
@settings(random_talks, max_examples=12)
@given(data=st.data())
def test_same_turn_in_other_words_is_the_same_turn(talk, style, spell, data):
    """A client that always spells answers its own way still continues them, wherever the template lets it."""
    plain, changed = talk(style), talk(style)
    threads = Thread(), Thread()
    for _ in range(3):
        tools = TOOLS if STYLES[style].calls else None
        asked = next_messages(data, style, threads[0])
        text, finished = data.draw(answers_of(style, tools is not None), "answer")
        nodes = []
        for chat, thread in ((plain, threads[0]), (changed, threads[1])):
            ids = [*chat.ids(text), chat.end] if finished else chat.ids(text) or [0]
            reason = "stop" if finished else "length"
            try:
                nodes.append(chat.say([*thread.messages, *asked], ids, stop_reason=reason, tools=tools))
            except RequestError:
                nodes.append(None)
        if nodes[0] is None:
            return
        assert nodes[1] is not None
        assert nodes[1].parent == nodes[0].parent
        assert nodes[1].extends == nodes[0].extends
        assert changed.tree.token_ids(nodes[1]) == plain.tree.token_ids(nodes[0])
        threads = (
            threads[0].then(plain, nodes[0], asked, as_it_is),
            threads[1].then(changed, nodes[1], asked, spell),
        )


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("style", STYLES)
def test_turn_that_says_something_else_begins_a_branch(talk, style, edit):
    chat = talk(style)
    question = {"role": "user", "content": "1+2"}
    node = chat.say([question], "an answer")
    prompt = chat.tree.prompt([question, edit(node.message), {"role": "user", "content": "go on"}])
    assert prompt.parent is None


@pytest.mark.parametrize("style", STYLES)
def test_append_only_templates_never_rewrite(talk, style):
    chat = talk(style)
    messages = [{"role": "user", "content": "q"}]
    for turn in range(5):
        node = chat.say(messages, f"</think>{turn}" if STYLES[style].opens_thinking else f"answer {turn}")
        messages = [*messages, node.message, {"role": "user", "content": "more"}]
    assert chat.tree.rewrites == (4 if STYLES[style].opens_thinking else 0)


@pytest.mark.parametrize("style", [name for name, style in STYLES.items() if style.thinks])
def test_templates_that_drop_thinking_are_counted(talk, style):
    chat = talk(style)
    opening = "" if STYLES[style].opens_thinking else "<think>\n"
    messages = [{"role": "user", "content": "q"}]
    for turn in range(4):
        node = chat.say(messages, f"{opening}hm {turn}\n</think>\n\nanswer")
        assert node.message == {"role": "assistant", "content": "answer", "reasoning_content": f"hm {turn}"}
        messages = [*messages, node.message, {"role": "user", "content": "more"}]
    assert chat.tree.rewrites == 3
    assert all(node.parent == (node.index - 1 if node.index else None) for node in chat.tree.completions)


def test_siblings_that_differ_in_thinking_only_are_told_apart_by_it(talk):
    chat = talk("qwen3")
    question = {"role": "user", "content": "q"}
    siblings = [
        chat.say([question], f"<think>\n{thought}\n</think>\n\n12", choice=choice)
        for choice, thought in enumerate(["one", "two"])
    ]
    for sibling in siblings:
        follow = [question, sibling.message, {"role": "tool", "content": "x", "tool_call_id": "y"}]
        assert chat.tree.prompt(follow).parent == sibling.index


def test_sibling_that_nothing_tells_apart_is_not_guessed(talk):
    """Same words, different tokens, thinking dropped by the client: either could be meant."""
    chat = talk("qwen3")
    first = chat.say([{"role": "user", "content": "a"}], "b")
    start = [{"role": "user", "content": "a"}, first.message, {"role": "user", "content": "q"}]
    for choice, thought in enumerate(["one", "two"]):
        chat.say(start, f"<think>\n{thought}\n</think>\n\n12", choice=choice)
    messages = [*start, {"role": "assistant", "content": "12"}, {"role": "user", "content": "more"}]
    assert chat.tree.prompt(messages).parent == first.index


@pytest.mark.parametrize("style", STYLES)
def test_siblings_of_equal_text_are_both_trained(talk, style):
    chat = talk(style)
    question = {"role": "user", "content": "q"}
    one, two = (chat.say([question], "same", choice=choice) for choice in range(2))
    rows = export(chat.tree, "individual", 1.0)
    assert [row.input_ids[row.loss_mask].tolist() for row in rows] == [one.output_ids.tolist(), two.output_ids.tolist()]


def test_call_ids_that_the_model_wrote_come_back_to_it(talk):
    chat = talk("mistral")
    question = {"role": "user", "content": "1+2"}
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "Ab3456789"}]'
    node = chat.say([question], call, tools=TOOLS)
    call_id = node.message["tool_calls"][0]["id"]
    prompt = chat.tree.prompt(
        [question, node.message, {"role": "tool", "content": "3", "tool_call_id": call_id}], TOOLS
    )
    assert prompt.extends
    assert chat.tree.renderer.decode(prompt.new_ids) == (
        '[TOOL_RESULTS] {"content": "3", "call_id": "Ab3456789"}[/TOOL_RESULTS]'
    )


def test_calls_that_a_template_refuses_are_served_as_the_client_spells_them(talk):
    chat = talk("gemma")
    question = {"role": "user", "content": "1+2"}
    node = chat.say([question], '<tool_call>{"name": "add", "arguments": {}}</tool_call>', tools=TOOLS)
    assert node.message["tool_calls"]
    as_text = {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {}}</tool_call>'}
    messages = [question, as_text, {"role": "user", "content": "Observation: 3"}]
    prompt = chat.tree.prompt(messages, TOOLS)
    assert prompt.parent == node.index


@pytest.mark.parametrize("style", STYLES)
def test_what_is_stored_grows_with_what_is_new(talk, style):
    chat = talk(style)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    stored = []
    for turn in range(40):
        node = chat.say(messages, f"</think>answer {turn}")
        stored.append(len(node.prompt_ids) + len(node.output_ids))
        messages = [*messages, node.message, {"role": "user", "content": f"question {turn}"}]
    if STYLES[style].thinks:
        return  # such a template rewrites the past, which is counted instead
    assert sum(stored) == len(chat.tree.token_ids(chat.tree.completions[-1]))
    assert max(stored[1:]) <= min(stored[1:]) + 4
