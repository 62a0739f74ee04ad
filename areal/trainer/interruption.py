"""Ctrl-C: the first one asks a run to end in order, the second ends it at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interrupted(Exception):
    """The user asked the run to end; everything is to be saved."""


class Interruption:
    """While entered, SIGINT only sets a flag and calls `tell`, which must be safe inside a signal handler."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self._asked = False
        # Python delivers signals to the main thread only, and only it may choose what they do.
        self._works = threading.current_thread() is threading.main_thread()

    def check(self) -> None:
        """Raise `Interrupted` if Ctrl-C has come."""
        if self._asked:
            raise Interrupted

    def __enter__(self) -> Self:
        if self._works:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._works:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._tell()
