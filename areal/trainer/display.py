"""What a person sees of a run, on stderr, while it goes on; what is said at its start and end is in `notices.py`.

`Progress` is a live bar in a terminal and about twenty plain lines anywhere else; `Announcer` is the same for a slow
preparation. Lines are broken between words, never inside one. Nobody has to read them: a pipe that is closed at its
other end does not end a run.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal.utils.closing import Closing
from areal.utils.logging import ROOT
from areal.utils.shorten import duration

PLAIN_LINES = 20
"""About how many lines a whole run prints where there is no terminal."""
LEAST_BAR = 10
"""Columns of a bar; where there is no room for it there is none."""
LEAST_SPARK, MOST_SPARK = 8, 40
"""Columns of the curve in the live line."""
MOST_POINTS = 512
"""That the curve is drawn from."""
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class ShownFigure:
    """A number that is shown of a step."""

    show: Callable[[float], str]
    meaning: str
    """For the legend; empty = it says what it is."""


FIGURES = {
    "nll": ShownFigure(lambda value: f"loss {value:.3f}", "mean negative log-likelihood of the learned tokens"),
    "reward": ShownFigure(lambda value: f"reward {value:.2f}", "mean over the step's episodes"),
    "accuracy": ShownFigure(lambda value: f"right {value:.0%}", "the chosen answer is ahead"),
    "eval_accuracy": ShownFigure(lambda value: f"held-out right {value:.0%}", "the same of pairs that are not trained"),
    "eval_reward": ShownFigure(lambda value: f"held-out {value:.2f}", "mean reward on tasks that are not trained"),
    "tokens_per_second": ShownFigure(lambda value: f"{value:,.0f} tok/s", "sampled tokens trained in a second"),
    "staleness": ShownFigure(
        lambda value: f"staleness {value:.1f}", "updates of the weights between sampling and training, on average"
    ),
    "rejected": ShownFigure(lambda value: f"rejected {value:.0f}", "episodes so far that failed or were too old"),
    "equal_steps": ShownFigure(lambda value: f"bit-equal {value:.0f}", ""),
}
"""Figures that are shown, in this order."""
HELD_OUT = ("eval_accuracy", "eval_reward")
"""Those of them that are measured rarely."""
CURVE = "reward"
"""The figure whose course is drawn."""


class PatientConsole(Console):
    """If what reads it is gone, nothing more is printed and the program goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


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
        *,
        quiet: bool = False,
    ) -> None:
        """A quiet one shows only what is said by `say`."""
        self.console = console or PatientConsole(stderr=True)
        self._total, self._start = total_steps, start_step
        self._clock = clock
        self._quiet = quiet
        self._first: tuple[int, float] | None = None
        self._shown: dict[str, float] = {}
        self._curve = Curve()
        self._printed_share = -1
        self._has_legend = False
        self._bar: _LiveBar | None = None

    def update(self, step: int, row: Mapping[str, float | None]) -> None:
        """Show that `step` steps are done, of which `row` holds the latest numbers."""
        known = {key: value for key in FIGURES if (value := row.get(key)) is not None}
        self._shown.update(known)
        if CURVE in known:
            self._curve.add(known[CURVE])
        if self._quiet:
            return
        if self._first is None:
            self._first = (step, self._clock())
        if known.keys() & {"nll", CURVE} and not self._has_legend:
            self._has_legend = True
            self.note(legend(self._shown))
        if self.console.is_interactive:
            self._bar = self._bar or _LiveBar(self.console, self._total, self._times)
            self._bar.update(step, self._facts(), self._curve)
        else:
            self._print_sometimes(step)

    def recall(self, rows: Iterable[Mapping[str, float | None]]) -> None:
        """Steps of earlier sessions: the curve begins with theirs, and what was held out is as last measured there."""
        for row in rows:
            self._shown.update({key: value for key in HELD_OUT if (value := row.get(key)) is not None})
            if (value := row.get(CURVE)) is not None:
                self._curve.add(value)

    def say(self, what: RenderableType) -> None:
        """Print above the bar. Brackets in a text are printed, not taken for markup."""
        show(self.console, what)

    def note(self, what: RenderableType) -> None:
        """The same for what a quiet run leaves out."""
        if not self._quiet:
            self.say(what)

    @contextmanager
    def spinner(self, text: str) -> Iterator[None]:
        """Say what the run is waiting for, and at the end how long that took."""
        began = self._clock()
        with self.waiting(text):
            if not self.console.is_interactive:
                self.note(f"{text} …")
            yield
        self.note(f"{text}: {self._clock() - began:.1f} s")

    def waiting(self, text: str) -> AbstractContextManager[Any]:
        """Show what the run is doing besides its steps, for as long as that takes; only in a terminal."""
        if self._bar is not None:
            return self._bar.doing(text)
        return nullcontext() if self._quiet else waiting(text, self.console)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _facts(self) -> list[str]:
        return [figure.show(self._shown[key]) for key, figure in FIGURES.items() if key in self._shown]

    def _times(self, step: int) -> str:
        """`1 min 3 s, 2 min 20 s left`"""
        assert self._first is not None
        first_step, began = self._first
        elapsed, done, left = self._clock() - began, step - first_step, self._total - step
        if left <= 0 or done <= 0:
            return duration(elapsed)
        return f"{duration(elapsed)}, {duration(elapsed / done * left)} left"

    def _print_sometimes(self, step: int) -> None:
        share = (step - self._start) * PLAIN_LINES // max(1, self._total - self._start)
        if share == self._printed_share:
            return
        self._printed_share = share
        self.say("  ".join([f"step {step}/{self._total}", *self._facts(), self._times(step)]))


def legend(shown: Mapping[str, float]) -> Text:
    """What the figures of a step mean."""
    meanings = {
        " ".join(word for word in figure.show(0.0).split() if not word[0].isdigit()): figure.meaning
        for key, figure in FIGURES.items()
        if key in shown and figure.meaning
    }
    width = max(map(len, meanings), default=0)
    return Text("\n".join(f"{name:{width}}  {meaning}" for name, meaning in meanings.items()), style="dim")


class Curve:
    """The course of a figure in so many points, whatever the number of steps."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._steps_per_point = 1
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._steps_per_point:
            return
        self._points.append(_mean(self._pending))
        self._pending = []
        if len(self._points) == MOST_POINTS:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, MOST_POINTS, 2)]
            self._steps_per_point *= 2

    def drawn(self, columns: int) -> str:
        """From its beginning to now, a character for each stretch of steps; rewards in [0, 1] on that scale."""
        points = self._points
        if not points:
            return ""
        columns = min(columns, len(points))
        ends = [len(points) * column // columns for column in range(columns + 1)]
        means = [_mean(points[begin:end]) for begin, end in pairwise(ends)]
        low, high = min([0.0, *means]), max([1.0, *means])
        if low < 0 or high > 1:
            low, high = min(means), max(means)
        top = len(SPARKS) - 1
        return "".join(SPARKS[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class _LiveBar:
    """A bar with figures under it; log lines go above it."""

    def __init__(self, console: Console, total: int, times: Callable[[int], str]) -> None:
        """`times`: what is said of a step's time, asked whenever the bar is drawn."""
        self._total, self._times = total, times
        self._step, self._facts, self._curve = 0, [""], Curve()
        self._doing = ""
        self._live = Live(self, console=console)
        stderr = sys.stderr
        self._live.start()
        self._restore_logs = _redirect_logs(stderr)

    def update(self, step: int, facts: list[str], curve: Curve) -> None:
        self._step, self._facts, self._curve = step, facts, curve

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        self._doing = text
        try:
            yield
        finally:
            self._doing = ""

    def close(self) -> None:
        self._restore_logs()
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield BarLine(f"step {self._step}/{self._total}", self._step / self._total, self._times(self._step))
        others = cell_len("  ".join(self._facts)) + 1
        room = min(MOST_SPARK, max(LEAST_SPARK, width - others))
        drawn = self._curve.drawn(room)
        facts = [f"{fact} {drawn}" if drawn and fact.startswith(CURVE) else fact for fact in self._facts]
        yield Text("\n".join(filled(facts + ([f"{self._doing} …"] if self._doing else []), width, "  ")))


class BarLine:
    """What is done, a bar, and the time it takes, on one line if there is room, else on two without the bar."""

    def __init__(self, what: str, share: float, times: str) -> None:
        self._what, self._share, self._times = what, min(1.0, share), times

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - cell_len(self._what) - cell_len(self._times) - 2
        if room < LEAST_BAR:
            yield Text("\n".join(filled([self._what, self._times], options.max_width, "  ")))
            return
        line = Table.grid(padding=(0, 1), pad_edge=False)
        line.add_row(Text(self._what), ProgressBar(1.0, self._share, width=room), Text(self._times))
        yield line


def filled(parts: list[str], width: int, between: str, indent: str = "") -> list[str]:
    """Lines of parts, as many as there is room for on each; a part that is wider than a line has one of its own."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{between}{part}"
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"{indent}{part}")
    return lines


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
    """Reports on a slow preparation: a bar with an estimate in a terminal, elsewhere its first and its last report.

    Prints nothing if it is never called.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
    ) -> None:
        self._console = console or PatientConsole(stderr=True)
        self._clock = clock
        self._quiet = quiet
        self._began = clock()
        self._live: Live | None = None
        self._printed = self._last = ""
        self._share = 0.0

    def __call__(self, text: str, share: float) -> None:
        """`share` of the whole is done, as far as can be said."""
        self._last, self._share = text, share
        if self._quiet:
            return
        if not self._console.is_interactive:
            if not self._printed:
                self._print(text)
        elif self._live is None:
            self._live = Live(get_renderable=self._line, console=self._console, transient=True)
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        if not self._quiet and self._last != self._printed:
            self._print(f"{self._last}, {duration(self._clock() - self._began)}")

    def _line(self) -> BarLine:
        elapsed, share = self._clock() - self._began, self._share
        left = f"about {duration(elapsed / share * (1 - share))} left" if 0 < share < 1 else ""
        times = [duration(elapsed), "not much longer" if share >= 1 else left]
        return BarLine(self._last, share, ", ".join(filter(None, times)))

    def _print(self, text: str) -> None:
        self._printed = text
        show(self._console, text)


def waiting(text: str, console: Console | None = None) -> AbstractContextManager[Any]:
    """Show what is awaited, for the length of a `with` block; only in a terminal."""
    console = console or PatientConsole(stderr=True)
    return console.status(Text(f"{text} …")) if console.is_interactive else nullcontext()


def say(what: RenderableType) -> None:
    """Print where there is no `Progress` yet."""
    show(PatientConsole(stderr=True), what)


def show(console: Console, what: RenderableType) -> None:
    """Print; brackets in a text are no markup. In a terminal its lines are broken between words."""
    if not isinstance(what, str | Text):
        console.print(what, markup=False, highlight=False, emoji=False)
        return
    style = what.style if isinstance(what, Text) else ""
    lines = str(what).splitlines()
    if console.is_terminal:
        lines = [part for line in lines for part in filled(line.split(" "), console.width, " ", indent="  ")]
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)
