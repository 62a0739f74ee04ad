"""What a person sees of a run, on stderr: progress, notices at its start and its end, whole conversations.

`Progress` is a live bar in a terminal and about twenty plain lines anywhere else; `Announcer` is the same for a slow
preparation. The functions below make what they print: conversations as panels, notices as text.

Model output is shown, never obeyed: markup and control characters in it are printed, not interpreted.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.status import Status
from rich.text import Text

from areal.api.messages import Episode
from areal.utils.closing import Closing
from areal.utils.logging import ROOT
from areal.utils.shorten import duration

PLAIN_LINES = 20
"""About how many lines a whole run prints where there is no terminal."""

FIGURES: dict[str, Callable[[float], str]] = {
    "nll": lambda value: f"loss {value:.3f}",
    "reward": lambda value: f"reward {value:.2f}",
    "eval_reward": lambda value: f"held-out {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "staleness": lambda value: f"staleness {value:.1f}",
    "rejected": lambda value: f"rejected {value:.0f}",
    "equal_steps": lambda value: f"bit-equal {value:.0f}",
}
"""Figures that are shown, in this order, and how each reads."""


class Progress(Closing):
    """`with Progress(total_steps) as progress:` … `progress.update(step, row)` after each step.

    It keeps the last value of each figure it shows, because held-out success is measured rarely.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(stderr=True)
        self._total, self._start = total_steps, start_step
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._shown: dict[str, float] = {}
        self._printed_share = -1
        self._bar: _LiveBar | None = None

    def update(self, step: int, row: Mapping[str, float | None]) -> None:
        """Show that `step` steps are done, of which `row` holds the latest numbers."""
        self._shown.update({key: row[key] for key in FIGURES if row.get(key) is not None})  # type: ignore[misc]
        if self._first is None:
            self._begin(step)
        if self._bar is not None:
            self._bar.update(step, self._facts(), self._eta(step))
        else:
            self._print_sometimes(step)

    def say(self, what: RenderableType) -> None:
        """Print above the bar. Brackets in a text are printed, not taken for markup."""
        plain = isinstance(what, str)
        self.console.print(what, markup=False, highlight=False, emoji=False, soft_wrap=plain)

    @contextmanager
    def spinner(self, text: str) -> Iterator[None]:
        """Say what the run is waiting for, and at the end how long that took."""
        began = self._clock()
        if self._bar is None and self.console.is_terminal:
            with self.console.status(Text(f"{text} …")):
                yield
        else:
            self.say(f"{text} …")
            yield
        self.say(f"{text}: {self._clock() - began:.1f} s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _begin(self, step: int) -> None:
        """The bar starts with the first numbers, so that set-up phases have the terminal to themselves."""
        self._first = (step, self._clock())
        if self.console.is_terminal:
            self._bar = _LiveBar(self.console, self._total)

    def _facts(self) -> str:
        return "  ".join(show(self._shown[key]) for key, show in FIGURES.items() if key in self._shown)

    def _eta(self, step: int) -> str:
        assert self._first is not None
        first_step, began = self._first
        done, left = step - first_step, self._total - step
        if left <= 0 or done <= 0:
            return ""
        return f"{duration((self._clock() - began) / done * left)} left"

    def _print_sometimes(self, step: int) -> None:
        share = (step - self._start) * PLAIN_LINES // max(1, self._total - self._start)
        if share == self._printed_share:
            return
        self._printed_share = share
        self.say("  ".join(part for part in (f"step {step}/{self._total}", self._facts(), self._eta(step)) if part))


class _LiveBar:
    """A bar with a line of figures under it; log lines go above it."""

    def __init__(self, console: Console, total: int) -> None:
        self._bar = Bar(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[eta]}")
        )
        self._bar.expand = True
        self._task = self._bar.add_task("", total=total, eta="")
        self._facts = Text()
        self._live = Live(console=console, get_renderable=lambda: Group(self._bar.get_renderable(), self._facts))
        stderr = sys.stderr
        self._live.start()
        self._restore_logs = _redirect_logs(stderr)

    def update(self, step: int, facts: str, eta: str) -> None:
        self._bar.update(self._task, completed=step, eta=eta)
        self._facts = Text(facts)

    def close(self) -> None:
        self._restore_logs()
        self._live.stop()


def _redirect_logs(before: Any) -> Callable[[], None]:
    """Move log handlers from `before`, the old sys.stderr, to the bar's own; returns what moves them back."""
    handlers = [h for h in logging.getLogger(ROOT).handlers if isinstance(h, logging.StreamHandler)]
    moved = [handler for handler in handlers if handler.stream is before]
    for handler in moved:
        handler.setStream(sys.stderr)

    def restore() -> None:
        for handler in moved:
            handler.setStream(before)

    return restore


class Announcer(Closing):
    """Reports on a slow preparation: one changing line in a terminal, elsewhere its first and its last report.

    Prints nothing if it is never called.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._printed = self._last = ""

    def __call__(self, text: str) -> None:
        self._last = text
        if not self._console.is_terminal:
            if not self._printed:
                self._print(text)
        elif self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
        if self._last != self._printed:
            self._print(self._last)

    def _print(self, text: str) -> None:
        self._printed = text
        self._console.print(Text(text), soft_wrap=True)


SHOWN_CHARACTERS = 600
SHOWN_LINES = 12
COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def render_episode(episode: Episode, title: str = "") -> Panel:
    """One whole conversation with its rewards; what is left out of long contents is counted."""
    parts = [part for message in episode.messages for part in _render_message(message)]
    return Panel(
        Group(*parts) if parts else Text("no messages were recorded", style="dim"),
        title=Text(title) if title else None,
        title_align="left",
        subtitle=Text(_episode_facts(episode)),
        subtitle_align="left",
        border_style="dim",
    )


def _episode_facts(episode: Episode) -> str:
    oldest, newest = episode.oldest_version, episode.newest_version
    facts = [f"reward {episode.reward:g}", _count(episode.calls, "call"), _count(episode.trained_tokens, "token")]
    if oldest is not None:
        facts.append(f"weights {oldest}" if oldest == newest else f"weights {oldest}–{newest}")
    facts.append(f"{episode.seconds:.2f} s")
    return " · ".join(facts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _render_message(message: Mapping[str, Any]) -> list[Text | Padding]:
    role = str(message.get("role", "?"))
    head = Text(role, style=f"bold {COLOURS.get(role, 'white')}")
    if message.get("reward") is not None:
        head.append(f"  reward {message['reward']:g}", style="bold")
    lines: list[Text | Padding] = [head]
    content = _content_text(message.get("content"))
    if content:
        lines.append(Padding(Text(_clip(_printable(content))), (0, 0, 0, 2)))
    calls = [_call_text(call) for call in message.get("tool_calls") or []]
    lines.extend(Padding(Text(_clip(_printable(call)), style="yellow"), (0, 0, 0, 2)) for call in calls)
    return lines


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f"→ {function.get('name', '?')}({arguments})"


def _content_text(content: Any) -> str:
    """Text of a message's content, which may be a list of parts; a part without text is named by its type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return str(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text.replace("\t", "    "))


def _clip(text: str) -> str:
    text = text.strip("\n")
    kept = "\n".join(text.splitlines()[:SHOWN_LINES])[:SHOWN_CHARACTERS]
    left_out = len(text) - len(kept)
    return kept if left_out <= 0 else f"{kept.rstrip()} … ({left_out:,} more characters)"


def say(text: str) -> None:
    """One line, where there is no `Progress` yet."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


STOPPING = "stopping after the current step; press Ctrl-C again to stop at once"


def hello(run: Path, step: int) -> str:
    resumed = f" (resuming after step {step})" if step else ""
    return f"run directory {run}{resumed}"


def stopped(run: Path, step: int, total_steps: int) -> str:
    when = f"after step {step} of {total_steps}" if step else "before the first step"
    return f"stopped {when}; everything is saved in {run}\nto go on, give the same command with trial_name={run.name}"


def results(summary: dict[str, Any]) -> list[str]:
    """What a PPO run cost and how well it went, a line each."""
    cpu = " · ".join(f"{name}: {seconds:.0f} s" for name, seconds in summary["cpu_seconds"].items())
    return [
        f"{summary['calls']:,} model calls, {summary['calls_per_second']:.0f} per second · "
        f"engine busy during {summary['overlap']:.0%} of training",
        f"processor time · {cpu}",
        *_pauses(summary["weight_pause_seconds"]),
        _logprobs(summary["max_logprob_difference"]),
        *_dropped(summary),
        *summary.get("stalls", []),
        *(summary[name] for name in ("greedy_verdict", "verdict") if name in summary),
    ]


def _logprobs(difference: float | None) -> str:
    if difference is None:
        return "engine and trainer log-probs were not compared: no token of the weights in training had an advantage"
    return f"engine and trainer log-probs differ by at most {difference:.0e}"


def _dropped(summary: dict[str, Any]) -> list[str]:
    """Whether what was dropped for its age is like what was trained."""
    dropped, trained = summary.get("dropped", {}), summary.get("trained", {})
    if not dropped.get("groups"):
        return []
    share = dropped["groups"] / (dropped["groups"] + trained["groups"])
    compared = ", ".join(
        f"{name} {format(dropped[key], form)} against {format(trained[key], form)}"
        for name, key, form in (
            ("seconds", "episode_seconds", ".2g"),
            ("tokens", "episode_tokens", ".0f"),
            ("reward", "episode_reward", ".2f"),
        )
    )
    return [
        f"{dropped['groups']:,} groups ({share:.1%}) were dropped as too old; their mean episode against the trained: "
        f"{compared}; rollout.when_stale=wait trains them all"
    ]


def _pauses(seconds: dict[str, float]) -> list[str]:
    if not seconds:
        return []
    return [
        f"new weights held generation up for {1e3 * seconds['median']:.0f} ms (median), "
        f"{1e3 * seconds['max']:.0f} ms at most"
    ]


def places(run: Path, model: Path, curve: Path | None = None) -> list[str]:
    """Where to find what a run leaves, a line each."""
    return [
        *([f"curve       {curve}"] if curve else []),
        f"run         {run}",
        f"model       {model}",
        f"talk to it  areal chat {model}",
    ]
