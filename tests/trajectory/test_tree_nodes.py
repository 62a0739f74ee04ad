"""The tree of an episode as other processes get it: parents, what was said in between, rewards, ends."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scripted_talk import Talk

from areal.infra.rpc.wire import api_wire
from areal.trajectory import assign_reward, export, nodes_of

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def branching(talk: Callable[[str], Talk]) -> Talk:
    """Two answers to one request, the first of which is continued twice, and a conversation of its own."""
    chat = talk("chatml")
    ask = [user("q")]
    for choice in range(2):
        chat.say(ask, "AB"[choice], choice=choice)
    again = [*ask, {"role": "assistant", "content": "A"}, user("go on")]
    chat.say(again, "C")
    chat.say(again, chat.ids("D"), stop_reason="length")
    chat.say([user("another")], "E")
    return chat


def test_branches_and_choices_have_their_parents_and_only_what_is_new(talk: Callable[[str], Talk]) -> None:
    chat = branching(talk)
    assign_reward(chat.tree, {"id-2": 1.0, "id-4": -0.5}, "agent")
    nodes = nodes_of(chat.tree)
    assert [node.parent for node in nodes] == [None, None, 0, 0, None]
    assert [node.extends for node in nodes] == [False, False, True, True, False]
    asked = [[message["content"] for message in node.messages] for node in nodes]
    assert asked == [["q"], ["q"], ["go on"], ["go on"], ["another"]]
    assert [node.message["content"] for node in nodes] == ["A", "B", "C", "D", "E"]
    assert [node.reward for node in nodes] == [None, None, 1.0, None, -0.5]
    assert [node.finish for node in nodes] == ["stop", "stop", "stop", "length", "stop"]


def test_rows_say_where_the_tokens_of_a_node_are(talk: Callable[[str], Talk]) -> None:
    tree = branching(talk).tree
    for style in ("individual", "concat"):
        rows = export(tree, style, 1.0)  # type: ignore[arg-type]
        for index, _ in enumerate(nodes_of(tree)):
            found = np.concatenate([row.input_ids[row.completion_index == index] for row in rows])
            assert found.tolist() == tree.completions[index].output_ids.tolist()


def test_a_rewritten_past_is_the_same_conversation_with_tokens_of_its_own(talk: Callable[[str], Talk]) -> None:
    chat = talk("qwen3")
    said = chat.say([user("q")], "<think>\nhm\n</think>\n\nA")
    chat.say([user("q"), said.message, user("go on")], "B")
    first, second = nodes_of(chat.tree)
    assert first.message["reasoning_content"].strip() == "hm"
    assert (second.parent, second.extends, len(second.messages)) == (0, False, 1)


def test_tools_are_named_and_a_call_is_why_an_answer_ended(talk: Callable[[str], Talk]) -> None:
    chat = talk("chatml")
    said = chat.say([user("q")], CALL, tools=[ADD])
    result = {"role": "tool", "tool_call_id": said.message["tool_calls"][0]["id"], "content": "2"}
    chat.say([user("q"), said.message, result], "done", tools=[ADD])
    chat.say([user("q"), said.message, result], "done")
    nodes = nodes_of(chat.tree)
    assert [node.tools for node in nodes] == [["add"], ["add"], []]
    assert [node.finish for node in nodes] == ["tool_calls", "stop", "stop"]
    assert nodes[1].messages == [result]


def test_nothing_is_copied_that_is_text_already(talk: Callable[[str], Talk]) -> None:
    tree = branching(talk).tree
    for node, recorded in zip(nodes_of(tree), tree.completions, strict=True):
        assert node.messages is recorded.messages
        assert node.message is recorded.message


def test_nodes_travel(talk: Callable[[str], Talk]) -> None:
    nodes, wire = nodes_of(branching(talk).tree), api_wire()
    assert wire.unpack(wire.pack(nodes)) == nodes
