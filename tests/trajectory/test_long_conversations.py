"""Long conversations: the end is rendered without the middle, and nothing is different for it."""

import logging
from random import Random
from typing import Any

import pytest
from chat_tokenizers import CHATML, STYLES, chat_tokenizer
from client_spellings import TOOLS
from scripted_talk import Talk

from areal.trajectory import Renderer, Tree
from areal.trajectory.parsers import ToolCall
from areal.trajectory.parsers.registry import TOOL_PARSERS

TURNS = 60


def script(style: str, random: Random, tool_loop: bool) -> tuple[str, bool]:
    """One answer and whether it calls a tool."""
    known = STYLES[style]
    calls = known.calls is not None and random.random() < (0.9 if tool_loop else 0.3)
    text = f"answer {random.randrange(100)}"
    if calls:
        text = TOOL_PARSERS[known.calls or ""].render([ToolCall("add", {"a": random.randrange(9)})])
    if known.thinks and random.random() < 0.3:
        text = f"<think>\nhm {random.randrange(100)}\n</think>\n\n{text}"
    return text.removeprefix("<think>\n") if known.opens_thinking else text, calls


def play(style: str, seed: int, tool_loop: bool, *, whole: bool) -> list[tuple[list[int], bool]]:
    chat = Talk(Tree(Renderer(chat_tokenizer(style))))
    chat.tree.renderer.skips_middle = not whole
    random = Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "begin"}]
    prompts = []
    for turn in range(TURNS):
        text, calls = script(style, random, tool_loop)
        prompt = chat.tree.prompt(messages, TOOLS)
        prompts.append((prompt.ids, prompt.extends))
        node = chat.say(messages, text, tools=TOOLS)
        made = node.message.get("tool_calls", ())
        assert bool(made) == calls or STYLES[style].opens_thinking
        results = [{"role": "tool", "content": f"{turn}", "tool_call_id": call["id"]} for call in made]
        messages = [*messages, node.message, *(results or [{"role": "user", "content": f"question {turn}"}])]
    assert chat.tree.renderer.skips_middle != whole
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize("tool_loop", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_prompts_are_those_of_the_whole_conversation(style, tool_loop):
    assert play(style, 1, tool_loop, whole=False) == play(style, 1, tool_loop, whole=True)


def test_turn_costs_what_it_adds():
    """Templates see no more messages late in a conversation than early, but where it is checked."""
    seen: list[int] = []

    class Counting(Renderer):
        def render(self, messages: list[dict[str, Any]], tools: Any, thinks: bool | None = None) -> str:
            seen.append(len(messages))
            return super().render(messages, tools, thinks)

    chat = Talk(Tree(Counting(chat_tokenizer("chatml"))))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    costs = []
    for turn in range(130):
        seen.clear()
        node = chat.say(messages, f"answer {turn}")
        costs.append(sum(seen))
        messages = [*messages, node.message, {"role": "user", "content": f"question {turn}"}]
    late = [cost for turn, cost in enumerate(costs) if turn > 20 and turn not in (32, 64, 128)]
    assert max(late) <= 8
    assert sum(costs) < 20 * len(costs)


def test_template_that_counts_messages_is_found_out(caplog):
    """Numbered turns: the end of a conversation depends on its middle."""
    tokenizer = chat_tokenizer.__wrapped__("chatml")
    tokenizer.chat_template = CHATML.replace(
        "message.role + '\\n'", "message.role ~ (loop.index if message.role == 'user' else '') ~ '\\n'"
    )
    assert tokenizer.chat_template != CHATML
    chat = Talk(Tree(Renderer(tokenizer)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            node = chat.say(messages, "answer")
            known = chat.tree.renderer.render(messages, None)
            assert chat.tree.token_ids(node)[: -len(node.output_ids)] == chat.ids(known)
            messages = [*messages, node.message, {"role": "user", "content": "question"}]
    assert not chat.tree.renderer.skips_middle


def test_template_that_draws_at_random_is_rendered_every_time() -> None:
    tokenizer = chat_tokenizer.__wrapped__("chatml")  # one of its own: the others are shared by all tests
    tokenizer.chat_template = "{{ range(8) | random }}" + tokenizer.chat_template
    renderer = Renderer(tokenizer)
    assert len({renderer.render([{"role": "user", "content": "hi"}], None) for _ in range(64)}) > 1
