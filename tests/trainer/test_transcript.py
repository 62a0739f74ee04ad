"""An episode as a person reads it, and that nothing a model says is obeyed."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from small_runs import make_conversation

from areal.api.messages import Episode
from areal.trainer.transcript import COLUMNS, Transcript


def shown(
    episode: Episode, title: str = "", expected: str | None = None, *, width: int = 80, plain: bool = False
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=not plain, no_color=True)
    console.print(Transcript(episode, title, expected))
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_conversation_shows_roles_contents_rewards_and_a_summary() -> None:
    text = shown(
        make_conversation(
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "4", "reward": 0.5},
        ),
        title="step 3",
    )
    assert "step 3" in text
    assert "What is 2 + 2?" in text
    assert "assistant  reward 0.5" in text
    assert "reward 1 · 2 model calls · 3 sampled tokens · 0.31 s" in text


def test_tool_calls_are_shown_as_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parsed = {"type": "function", "function": {"name": "add", "arguments": {"b": 2}}}
    text = shown(make_conversation({"role": "assistant", "content": None, "tool_calls": [call, parsed]}))
    assert '→ add({"a": 1})' in text
    assert '→ add({"b":2})' in text


def test_long_content_is_clipped_and_says_how_much_is_missing() -> None:
    text = shown(make_conversation({"role": "user", "content": "x" * 1000}, {"role": "user", "content": "a\n" * 50}))
    assert "(400 more characters)" in text
    assert "(76 more characters)" in text


def test_model_output_is_shown_and_never_obeyed() -> None:
    text = shown(make_conversation({"role": "assistant", "content": "[red]hi[/red]\x1b[2J\r"}))
    assert "[red]hi[/red]�[2J�" in text
    assert "\x1b" not in text


def test_parts_without_text_are_named_by_their_type() -> None:
    parts = [{"type": "text", "text": "look:"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    text = shown(make_conversation({"role": "user", "content": parts}))
    assert "look:" in text
    assert "[image_url]" in text


def test_episode_without_messages_is_shown_too() -> None:
    assert "no messages were recorded" in shown(Episode(rows=[], reward=0.0))


def test_number_beyond_64_bits_in_a_call_is_shown() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 10**30}}}
    text = shown(make_conversation({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert f'→ add({{"a":{10**30}}})' in text


def test_given_answer_is_beside_the_expected_one_with_a_mark() -> None:
    asked = {"role": "user", "content": "Sort 0705"}
    wrong = make_conversation(asked, {"role": "assistant", "content": "00ol"}, reward=0.0)
    right = make_conversation(asked, {"role": "assistant", "content": "0057"}, reward=1.0)
    partly = make_conversation(asked, {"role": "assistant", "content": ""}, reward=0.5)
    for plain in (True, False):
        assert "✗ given 00ol · expected 0057" in shown(wrong, "step 1", "0057", plain=plain)
        assert "✓ step 1" in shown(right, "step 1", "0057", plain=plain)
        assert "✓ given 0057 · expected 0057" in shown(right, "step 1", "0057", plain=plain)
        text = shown(partly, "step 1", "0057", plain=plain)
        assert "given nothing · expected 0057" in text
        assert not {"✓", "✗"} & set(text)
        assert "expected" not in shown(right, plain=plain)


def test_long_answer_is_compared_by_its_end() -> None:
    said = make_conversation({"role": "assistant", "content": f"{'so ' * 200}the answer is 42"})
    assert re.search(r"given … [so ]+ the answer is 42 · expected 42", shown(said, expected="42", width=120))


def test_without_a_terminal_there_is_no_frame() -> None:
    text = shown(make_conversation({"role": "user", "content": "What?"}), "step 3", plain=True)
    assert text.splitlines()[0] == "✓ step 3 · reward 1 · 2 model calls · 3 sampled tokens · 0.31 s"
    assert text.splitlines()[1:] == ["  user", "    What?"]


HOSTILE = {
    "escapes": "\x1b[2J\x1b]0;title\x07\x9b31m\r\b",
    "right to left": "abc \u202e\u2066 שלום \u200f",
    "html": "<script>alert(1)</script><img src=x>",
    "markup": "[red]hi[/red] [link=http://x]y[/link] :smile:",
    "long line": "x" * 1_000_000,
    "wide": "好" * 400,
    "combining": "e" + "\u0301" * 300,
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_output_stays_in_its_lines(text: str, width: int, plain: bool) -> None:
    call = {"type": "function", "function": {"name": text, "arguments": text}}
    episode = make_conversation(
        {"role": text, "content": text}, {"role": "assistant", "content": text, "tool_calls": [call]}
    )
    out = shown(episode, "step 1", text, width=width, plain=plain)
    assert max(cell_len(line) for line in out.splitlines()) <= (width if plain else min(width, COLUMNS))
    assert not [c for c in out if c != "\n" and not c.isprintable()]
    assert len(out) < 20_000
