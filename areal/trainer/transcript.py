"""One episode as a person reads it in a terminal: who said what, the answer given beside the one expected.

Model output is shown, never obeyed: markup and control characters in it are printed, not interpreted.
"""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from areal.api.messages import Episode
from areal.utils.conversation import answer_of, content_text
from areal.utils.shorten import printable

COLUMNS = 100
"""How wide a conversation is at most."""
SHOWN_CHARACTERS = 600
SHOWN_LINES = 12
ANSWER_CHARACTERS = 60
"""Of the given and the expected answer, which are beside each other."""
ROLE_CHARACTERS = 30
INDENT = "  "
COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class Transcript:
    """A whole conversation with its rewards; what is left out of long contents is counted.

    In a terminal it has a frame, elsewhere a line for what it is and an indent.
    """

    def __init__(self, episode: Episode, title: str = "", expected: str | None = None) -> None:
        """`expected`: the answer that the task asks for; None = it names none."""
        parts = [part for message in episode.messages for part in _render_message(message)]
        self._body = Group(*(parts or [Text("no messages were recorded", style="dim")]))
        self._answers = None if expected is None else _answers(episode, expected)
        self._title = Text.assemble(_mark(episode.reward), Text(title))
        self._facts = _episode_facts(episode)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        answers = [] if self._answers is None else [self._answers]
        if console.is_terminal:
            yield Panel(
                Group(self._body, *answers),
                title=self._title,
                title_align="left",
                subtitle=Text(self._facts),
                subtitle_align="left",
                border_style="dim",
                width=min(COLUMNS, options.max_width),
            )
        else:
            yield Text.assemble(self._title, " · ", self._facts, overflow="fold")
            narrower = options.update(width=max(1, options.max_width - len(INDENT)))
            for line in console.render_lines(Group(self._body, *answers), narrower, pad=False):
                yield Text(INDENT + "".join(segment.text for segment in line).rstrip())


def _mark(reward: float) -> tuple[str, str]:
    """Of a reward that is a plain success or failure."""
    return {1.0: ("✓ ", "bold green"), 0.0: ("✗ ", "bold red")}.get(reward, ("", ""))


def _answers(episode: Episode, expected: str) -> Text:
    texts = [_one_line(text) or "nothing" for text in (answer_of(episode.messages), expected)]
    return Text.assemble(_mark(episode.reward), ("given ", "dim"), texts[0], (" · expected ", "dim"), texts[1])


def _one_line(text: str) -> str:
    """Of a long answer its end, where the result usually is."""
    line = " ".join(_printable(text[-4 * SHOWN_CHARACTERS :]).split())
    return line if len(line) <= ANSWER_CHARACTERS else f"… {line[-ANSWER_CHARACTERS:].lstrip()}"


def _episode_facts(episode: Episode) -> str:
    calls, tokens = _count(episode.calls, "model call"), _count(episode.trained_tokens, "sampled token")
    return f"reward {episode.reward:g} · {calls} · {tokens} · {episode.seconds:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _render_message(message: Mapping[str, Any]) -> list[Text | Padding]:
    role = _printable(str(message.get("role", "?"))[:ROLE_CHARACTERS])
    head = Text(role, style=f"bold {COLOURS.get(role, 'white')}")
    if message.get("reward") is not None:
        head.append(f"  reward {message['reward']:g}", style="bold")
    lines: list[Text | Padding] = [head]
    content = content_text(message.get("content"))
    if content:
        lines.append(_indented(content))
    lines.extend(_indented(_call_text(call), "yellow") for call in message.get("tool_calls") or [])
    return lines


def _indented(text: str, style: str = "") -> Padding:
    return Padding(Text(_clip(text), style=style), (0, 0, 0, 2))


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f"→ {function.get('name', '?')}({arguments})"


def _printable(text: str) -> str:
    return printable(text.replace("\t", "    "))


def _clip(text: str) -> str:
    """The beginning of a text, made printable: one of a megabyte costs no more than a short one."""
    text = text.strip("\n")
    kept = "\n".join(text[:SHOWN_CHARACTERS].split("\n")[:SHOWN_LINES])
    left_out = len(text) - len(kept)
    shown = _printable(kept)
    return shown if left_out <= 0 else f"{shown.rstrip()} … ({left_out:,} more characters)"
