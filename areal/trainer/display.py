"""What a person sees while a run trains: a live bar in a terminal, a few plain lines anywhere else. Writes to stderr.

Owns the display only. It keeps the last value of each number it shows, because held-out success is measured rarely.
"""

# MERGED-DOC
# The sentences a run says to its user at its start and at its end.

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.status import Status
from rich.text import Text

from areal.utils.logging import ROOT
from areal.utils.threads import ThreadPlan

PLAIN_LINES = 20
"""About how many lines a whole run prints where there is no terminal."""

SHOWN: dict[str, Callable[[float], str]] = {
    "nll": lambda value: f"loss {value:.3f}",
    "reward": lambda value: f"reward {value:.2f}",
    "eval_reward": lambda value: f"held-out {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "staleness": lambda value: f"staleness {value:.1f}",
    "rejected": lambda value: f"rejected {value:.0f}",
}
"""Keys of a row that are shown, in this order, and how each reads."""


class Progress:
    """`with Progress(total_steps) as progress:` … `progress.update(step, row)` after each step."""

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
        self._shown.update({key: row[key] for key in SHOWN if row.get(key) is not None})  # type: ignore[misc]
        if self._first is None:
            self._begin(step)
        if self._bar is not None:
            self._bar.update(step, self._facts(), self._eta(step))
        else:
            self._print_sometimes(step)

    def say(self, what: RenderableType) -> None:
        """Print above the bar. Text is printed as it is, whatever brackets it holds."""
        plain = isinstance(what, str)
        self.console.print(what, markup=False, highlight=False, emoji=False, soft_wrap=plain)

    @contextmanager
    def spinner(self, text: str) -> Iterator[None]:
        """Say what is being waited for, and at its end how long it took."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, step: int) -> None:
        """The bar starts with the first numbers, so that set-up phases have the terminal to themselves."""
        self._first = (step, self._clock())
        if self.console.is_terminal:
            self._bar = _LiveBar(self.console, self._total)

    def _facts(self) -> str:
        return "  ".join(show(self._shown[key]) for key, show in SHOWN.items() if key in self._shown)

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


class Announcer:
    """Says how far a slow preparation is: one changing line in a terminal, elsewhere its first and its last word.

    Nothing appears if it is never called.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._said = self._last = ""

    def __call__(self, text: str) -> None:
        self._last = text
        if not self._console.is_terminal:
            if not self._said:
                self._say(text)
        elif self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if self._last != self._said:
            self._say(self._last)

    def _say(self, text: str) -> None:
        self._said = text
        self._console.print(Text(text), soft_wrap=True)


class _LiveBar:
    """A bar and a line of numbers under it; log lines go above while it lives."""

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
    """Move log handlers from `before`, the old sys.stderr, to the one the bar put in its place; return the way back."""
    handlers = [h for h in logging.getLogger(ROOT).handlers if isinstance(h, logging.StreamHandler)]
    moved = [handler for handler in handlers if handler.stream is before]
    for handler in moved:
        handler.setStream(sys.stderr)

    def restore() -> None:
        for handler in moved:
            handler.setStream(before)

    return restore


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def hello(run: Path, step: int, threads: ThreadPlan) -> str:
    resumed = f" (resuming after step {step})" if step else ""
    return f"run directory {run}{resumed}\n{threads.reason}"


def stopping() -> str:
    return "stopping after the present step; Ctrl-C again stops at once"


def stopped(run: Path, step: int, total_steps: int) -> str:
    when = f"after step {step} of {total_steps}" if step else "before the first step"
    return f"stopped {when}; everything is saved in {run}\nto go on, give the same command with trial_name={run.name}"


def closing(summary: dict[str, Any], run: Path, model: Path, curve: Path) -> str:
    """What it cost, how well it went, where everything is."""
    cpu = " · ".join(f"{name}: {seconds:.0f} s" for name, seconds in summary["cpu_seconds"].items())
    lines = [
        f"{summary['calls']:,} model calls, {summary['calls_per_second']:.0f} per second · "
        f"engine busy during {summary['overlap']:.0%} of training",
        f"processor time · {cpu}",
        *_pauses(summary["weight_pause_seconds"]),
        f"engine and trainer log-probs differ by at most {summary['max_logprob_difference']:.0e}",
        *summary.get("stalls", []),
        *_greedy(summary["held_out"]),
        *([summary["verdict"]] if "verdict" in summary else []),
        f"curve       {curve}",
        f"run         {run}",
        f"model       {model}",
        f"talk to it  areal chat {model}",
    ]
    return "\n".join(lines)


def _pauses(seconds: dict[str, float]) -> list[str]:
    if not seconds:
        return []
    return [
        f"new weights held generation up for {1e3 * seconds['median']:.0f} ms (median), "
        f"{1e3 * seconds['max']:.0f} ms at most"
    ]


def _greedy(held_out: dict[str, Any]) -> list[str]:
    if "before_greedy" not in held_out or "after_greedy" not in held_out:
        return []
    before, after = held_out["before_greedy"], held_out["after_greedy"]
    return [f"greedy {before['reward']:.2f} → {after['reward']:.2f} on {after['tasks']} held-out tasks"]
