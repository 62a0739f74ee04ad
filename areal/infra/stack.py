"""What an event loop's thread is doing right now, read from outside: which callback, whose line, for which episode.

Reading a stack costs the thread that is read nothing. It may move on meanwhile: what is told was true a moment ago.
"""

import asyncio
import linecache
import os
import sys
import sysconfig
from collections.abc import Collection
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from areal.infra.blocking_calls import remedy_for

PACKAGE = Path(__file__).parents[1]
WORKFLOWS = f"{PACKAGE / 'workflow'}{os.sep}"
"""The one room of this package whose code is a user's: episodes are written there."""
LIBRARIES = tuple(f"{path}{os.sep}" for path in (PACKAGE, *map(sysconfig.get_path, ("stdlib", "platstdlib"))))
INSTALLED = ("site-packages", "dist-packages")
"""Directories that hold installed packages, whatever environment they belong to."""
CALLBACK = asyncio.Handle._run.__code__
"""Every callback of an event loop runs below this function."""
IMPORTING = "<frozen importlib._bootstrap>"


@dataclass(frozen=True)
class Place:
    """A line that holds an event loop."""

    where: str
    """`file:line`"""
    function: str
    source: str
    """The line's text; empty if it cannot be had."""
    remedy: str


@dataclass(frozen=True)
class Callback:
    """A callback that an event loop is running."""

    frame: FrameType
    """Of the call that runs it; another run of the same callback has another."""
    stack: list[FrameType]
    """Below that, outermost first."""

    @property
    def context(self) -> Context:
        """The variables it runs under, an episode's among them."""
        context: Context = self.frame.f_locals["self"]._context
        return context

    @property
    def is_importing(self) -> bool:
        return any(frame.f_code.co_filename == IMPORTING for frame in self.stack)

    def blame(self, entries: Collection[CodeType]) -> Place | None:
        """The innermost line of user code; None if there is none.

        `entries` are functions of ours that call user code, which may be installed where libraries are.
        """
        files = [frame.f_code.co_filename for frame in self.stack]
        own = [index for index, file in enumerate(files) if is_user_code(file)]
        below_entry = [index + 1 for index, frame in enumerate(self.stack[:-1]) if frame.f_code in entries]
        chosen = max(own or below_entry, default=None)
        return None if chosen is None else _place(self.stack[chosen], self.stack[chosen + 1 :])


def running_callback(thread_id: int) -> Callback | None:
    """The callback that a thread's event loop is in; None while it waits for something to do."""
    return callback_of(sys._current_frames().get(thread_id))


def callback_of(frame: FrameType | None) -> Callback | None:
    """The callback whose innermost frame this is."""
    stack: list[FrameType] = []
    found: Callback | None = None
    while frame is not None:
        if frame.f_code is CALLBACK:
            found = Callback(frame, stack[::-1])
        stack.append(frame)
        frame = frame.f_back
    return found


def is_user_code(file: str) -> bool:
    if file.startswith(WORKFLOWS):
        return True
    return not file.startswith((*LIBRARIES, "<frozen ")) and not any(
        f"{os.sep}{name}{os.sep}" in file for name in INSTALLED
    )


def _place(frame: FrameType, below: list[FrameType]) -> Place:
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    modules = [str(each.f_globals.get("__name__")) for each in below]
    where = f"{short_file(code.co_filename)}:{frame.f_lineno}"
    return Place(where, code.co_name, source, remedy_for(source, modules))


def short_file(file: str) -> str:
    """As seen from where the program was started, if it is below."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")
