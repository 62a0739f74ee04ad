"""Whether a process still lives, as distinct from being busy: a thread in it writes a byte a second to a pipe.

The thread is not the event loop, so code that blocks the loop for long does not silence it (`stalls.py` names that).
A process that is stopped (SIGSTOP), or whose interpreter is deadlocked, is silent. Code that computes without letting
other threads run is silent too, but uses the processor: that is not a freeze.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

VARIABLE = "AREAL_HEARTBEAT"
"""Holds the number of the pipe that a process inherits."""
BEAT_SECONDS = 1.0
_STOPPED = "Tt"
"""States in /proc/PID/stat: stopped by a signal, or by a debugger."""


def start_beating() -> None:
    """In the process: send heartbeats if the parent asked for them."""
    pipe = os.environ.pop(VARIABLE, None)
    if pipe is not None:
        os.set_inheritable(int(pipe), False)
        threading.Thread(target=_beat, args=(int(pipe),), name="areal heartbeat", daemon=True).start()


def _beat(pipe: int) -> None:
    never = threading.Event()
    try:
        while True:
            os.write(pipe, b".")
            never.wait(BEAT_SECONDS)
    except OSError:
        return  # the driver is gone


class Heartbeat:
    """At the driver: notices that a process has been silent for `seconds`.

    Before its first heartbeat a process may be loading its code, so then only one that is stopped counts as frozen.
    """

    def __init__(self, seconds: float | None) -> None:
        """None = it may be silent for ever."""
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._beats = False
        """Whether there was a heartbeat."""
        self._busy_at: int | None = None
        """The processor time that it had used when it was found silent; None since its last heartbeat."""
        ours, theirs = os.pipe()
        self._ours, self._theirs = FileIO(ours, "rb"), FileIO(theirs, "wb")

    @property
    def inherited(self) -> int:
        """The end of the pipe that the process is given."""
        return self._theirs.fileno()

    @property
    def env(self) -> dict[str, str]:
        """What the process needs in its environment."""
        return {VARIABLE: str(self.inherited)}

    def watch(self, pid: int, on_frozen: Callable[[str], None]) -> None:
        """The process has started; `on_frozen` is called at most once, with what is known of its state."""
        self._pid, self._on_frozen = pid, on_frozen
        self._theirs.close()
        self._loop.add_reader(self._ours, self._read)
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._ours.closed:
            self._loop.remove_reader(self._ours)
            self._ours.close()
        self._theirs.close()

    def _read(self) -> None:
        if not self._ours.read(4096):  # the process has ended
            self.close()
            return
        self._beats, self._busy_at = True, None
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._seconds is not None:
            self._timer = self._loop.call_later(self._seconds, self._on_silence)

    def _on_silence(self) -> None:
        try:
            state, used = _state(self._pid)
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or this system does not tell
            return
        if state in _STOPPED or (self._beats and used == self._busy_at):
            stopped = "a signal or a debugger has stopped it" if state in _STOPPED else "it does not compute either"
            self.close()
            self._on_frozen(f"no sign of life for {self._seconds:g} s; {stopped}")
        else:
            self._busy_at = used
            self._wait()


def _state(pid: int) -> tuple[str, int]:
    """The state of a process, and the processor time that it has used, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])
