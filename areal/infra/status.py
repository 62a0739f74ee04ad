"""Sentences about what the parts of a run do: who, what, since when, and until when at most.

A part's `Waits` becomes a `Doing` (`doing_of`), several episodes become one for each thing that they do (`together`),
and `describe` writes them as lines for a terminal. An event loop that does not answer is itself a finding: `ask_loop`
asks one from another thread and names the line that holds it.
"""

import asyncio
import shutil
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from areal.api.messages import Doing
from areal.infra import workflow_context
from areal.infra.stalls import PACKAGE, is_user_code, running_callback, short_file
from areal.utils.shorten import duration, shortened
from areal.utils.waits import Wait, Waits

LOOP_SECONDS = 1.0
"""An event loop that does not answer for so long is held by something."""
WIDTH = 80
MOST_WIDTH = 120
INDENT = 2
SOURCE_CHARACTERS = 60

Look = Callable[[], Awaitable[list[Doing]]]
"""Called on the event loop of what it looks at."""


def doing_of(part: str, waits: Waits) -> Doing | None:
    """What it waits for; None = for nothing.

    Its first wait is its whole task (an episode's is to run its agent), which is told if there is nothing in particular
    that it waits for. Its deadline holds either way.
    """
    now = waits.now()
    if not now:
        return None
    whole, told = now[0], now[1:] or now[:1]
    first, *others = [of_wait(part, each, whole) for each in told]
    return replace(first, inside=[replace(each, part="and") for each in others])


def of_wait(part: str, wait: Wait, whole: Wait | None = None) -> Doing:
    """What a part waits for; it ends with `whole` at the latest."""
    what = wait.what if isinstance(wait.what, str) else wait.what()
    if wait.where is not None and (line := wait.where()):
        what = f"{what}, at {line}"
    now = time.monotonic()
    ends = [(each.until, each) for each in (wait, whole) if each is not None and each.until is not None]
    if not ends:
        return Doing(part, what, now - wait.since)
    until, ending = min(ends, key=lambda end: end[0])
    limit = f"{ending.limit}={ending.limit_seconds:g}" if ending.limit else ""
    return Doing(part, what, now - wait.since, max(0.0, until - now), limit)


def together(doings: Iterable[Doing]) -> list[Doing]:
    """One for all that do the same, which is the one that has done it for longest; the longest first."""
    longest: dict[str, Doing] = {}
    for doing in sorted(doings, key=_age, reverse=True):
        if doing.what in longest:
            longest[doing.what].count += 1
        else:
            longest[doing.what] = replace(doing, count=1)
    return list(longest.values())


def _age(doing: Doing) -> float:
    return doing.seconds or 0.0


def describe(doings: Sequence[Doing], width: int | None = None) -> list[str]:
    """Lines of text; `width` in columns, None = the terminal's."""
    columns = width or min(MOST_WIDTH, shutil.get_terminal_size((WIDTH, 1)).columns)
    return [line for doing in doings for line in _lines(doing, columns, 0)]


def _lines(doing: Doing, columns: int, depth: int) -> list[str]:
    indent = " " * INDENT * depth
    own = textwrap.wrap(
        sentence(doing),
        max(columns, 20 + len(indent)),
        initial_indent=indent,
        subsequent_indent=indent + " " * 2 * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return own + [line for each in doing.inside for line in _lines(each, columns, depth + 1)]


def sentence(doing: Doing) -> str:
    said = f"{doing.part} {doing.what}"
    if doing.seconds is not None:
        said += f", for {duration(doing.seconds)}"
    if doing.left_seconds is not None:
        said += f", until {_clock(doing.left_seconds)} at most"
        said += f" ({doing.limit})" if doing.limit else ""
    if doing.count > 1:
        said += f"; so {'does 1 other' if doing.count == 2 else f'do {doing.count - 1} others'}"
    return "".join(each if each.isprintable() else "�" for each in said)  # names and lines of code may hold anything


def _clock(left_seconds: float) -> str:
    """When that is; with the date if that is another."""
    now = time.time()
    then = time.localtime(now + left_seconds)
    same_day = then.tm_yday == time.localtime(now).tm_yday and left_seconds < 86400
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", then)


@dataclass(frozen=True)
class WatchedLoop:
    """An event loop, as another thread sees it."""

    name: str
    loop: asyncio.AbstractEventLoop
    thread_id: int
    blocked_seconds: Callable[[], float | None] = lambda: None
    """For how long one callback has held it, where that is measured."""

    async def ask(self, look: Look) -> list[Doing]:
        """What `look` gives; if the loop does not answer, which line of code holds it. Call it on another loop."""
        asked = asyncio.run_coroutine_threadsafe(_awaited(look), self.loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), LOOP_SECONDS)
        except TimeoutError:
            return [self._held()]

    def _held(self) -> Doing:
        callback = running_callback(self.thread_id)
        if callback is None:
            return Doing(self.name, f"gave no answer for {LOOP_SECONDS:g} s and runs nothing")
        place, episode = callback.blame(()), workflow_context.of(callback.context)
        if place is None:
            what = f"has computed for over {LOOP_SECONDS:g} s without a pause, at {line_of(callback.stack)}"
            return Doing(self.name, what, self.blocked_seconds())
        source = f": {shortened(place.source, SOURCE_CHARACTERS)}" if place.source else ""
        whose = "" if episode.task_id is None else f" (task {episode.task_id})"
        what = f"is blocked at {place.where} in {place.function}{source}{whose}; all other episodes there wait"
        return Doing(self.name, what, self.blocked_seconds() or LOOP_SECONDS)


async def _awaited(look: Look) -> list[Doing]:
    return await look()


def line_of(stack: Sequence[FrameType]) -> str:
    """The innermost line of a stack (outermost first) that is of this package or a user's; empty if there is none."""
    ours = [frame for frame in stack if _tells(frame.f_code.co_filename)]
    return _line(ours[-1]) if ours else ""


def line_of_thread(thread_id: int) -> str:
    """The same for what a thread is doing."""
    frame, stack = sys._current_frames().get(thread_id), []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return line_of(stack[::-1])


def line_of_task(task: "asyncio.Task[Any]") -> str:
    """The innermost line of a user's code that a task waits at; empty if there is none."""
    awaiting: Any = task.get_coro()
    line = ""
    while awaiting is not None:
        frame = _first(awaiting, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None and is_user_code(frame.f_code.co_filename):
            line = _line(frame)
        awaiting = _first(awaiting, "cr_await", "gi_yieldfrom", "ag_await")
    return line


def _first(value: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(value, name, None)) is not None), None)


def _tells(file: str) -> bool:
    return file.startswith(str(PACKAGE)) or is_user_code(file)


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    shown = file.removeprefix(f"{PACKAGE.parent}/") if file.startswith(str(PACKAGE)) else short_file(file)
    return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
