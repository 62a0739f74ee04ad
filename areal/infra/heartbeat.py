"""Whether a process still lives, as distinct from being busy: a thread in it writes a byte a second to a pipe.

The thread is not the event loop, so code that blocks the loop for long does not silence it (`stalls.py` names that).
A process that is stopped (SIGSTOP), or whose interpreter is deadlocked, is silent. Code that computes without letting
other threads run is silent too, but uses the processor, or would if others let it: that is not a freeze.

Only the standard library: the process's keeper, which reads the pipe, must start at once.
"""

import os
import threading
from contextlib import suppress

VARIABLE = "AREAL_HEARTBEAT"
"""Holds the number of the pipe that a process inherits."""
BEAT_SECONDS = 1.0
_STOPPED = "Tt"
"""States in /proc/PID/stat: stopped by a signal, or by a debugger."""
_RUNNABLE = "R"
"""It computes, or waits for a processor to do so."""


def start_beating() -> None:
    """In the process: send heartbeats if its keeper asked for them."""
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
        return  # the keeper is gone


class FreezeWatch:
    """At the keeper: notices that a process has been silent for `seconds` and is frozen. Times are monotonic.

    Before its first heartbeat a process may be loading its code, so then only one that is stopped counts as frozen.
    """

    def __init__(self, pid: int, seconds: float, now: float) -> None:
        self.due = now + seconds
        """When `check` is to be called next; each heartbeat and each check put it off."""
        self._pid = pid
        self._seconds = seconds
        self._heard_at = now
        self._beats = False
        """Whether there was a heartbeat."""
        self._busy_at: int | None = None
        """The processor time that it had used when it was found silent; None since its last heartbeat."""

    def beat(self, now: float) -> None:
        self._beats, self._busy_at, self._heard_at = True, None, now
        self.due = now + self._seconds

    def silent_seconds(self, now: float) -> float:
        """Since its last heartbeat, or since its start."""
        return now - self._heard_at

    def check(self, now: float) -> str:
        """Why the process is frozen; empty = it is not, as far as one can tell."""
        self.due = now + self._seconds
        try:
            state, used = _state(self._pid)
            idle = self._beats and used == self._busy_at and _RUNNABLE not in _thread_states(self._pid)
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or this system does not tell
            return ""
        if state in _STOPPED or idle:
            stopped = "a signal or a debugger has stopped it" if state in _STOPPED else "it does not compute either"
            return f"no sign of life for {self._seconds:g} s; {stopped}"
        self._busy_at = used
        return ""


def _state(pid: int) -> tuple[str, int]:
    """The state of a process, and the processor time that it has used, in ticks."""
    fields = _fields(f"/proc/{pid}/stat")
    return fields[0], int(fields[11]) + int(fields[12])


def _thread_states(pid: int) -> set[str]:
    """Those of its threads that have not ended meanwhile."""
    states = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.add(_fields(f"/proc/{pid}/task/{thread}/stat")[0])
    return states


def _fields(path: str) -> list[str]:
    """What follows the name in such a file."""
    with open(path) as file:
        return file.read().rpartition(")")[2].split()
