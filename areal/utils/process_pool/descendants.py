"""The processes that a worker process starts, directly or not, and their end.

Workers, and the server that forks them, adopt orphans (Linux: "child subreaper"), so a process that begins a session of
its own or outlives its parent stays below them and is found: by the worker when a call ends, by the server when the
worker ends.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 5.0
"""Only a process that the kernel itself holds takes longer."""

SHARED_BY_CALLS: set[int] = set()
"""Children that the calls of a worker share on purpose, such as a sandbox's launcher; the end of a call leaves them."""


def die_with_parent(sign: int = signal.SIGKILL) -> None:
    """This process gets that signal when its parent ends. It survives an exec, and is not passed on by a fork."""
    _set_process_option(_PR_SET_PDEATHSIG, sign)


def adopt_orphans() -> None:
    """Descendants of this process whose parent ends become its children from now on."""
    _set_process_option(_PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Whether this process has any, ended ones included; without, it has no descendants either. One system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children_of(pid: int) -> list[int]:
    """Its direct children, ended ones included; none where the kernel does not list them."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                suppress(FileNotFoundError, ProcessLookupError),  # so has this thread; another has its children now
                open(f"/proc/{pid}/task/{thread}/children") as file,
            ):
                found += map(int, file.read().split())
    return found


def end_descendants(keep: Collection[int] = ()) -> bool:
    """Kill and reap everything below this process, except the children in `keep` and what is below them.

    Returns False if some process does not end even when killed.
    """
    deadline = time.monotonic() + _END_SECONDS
    while has_children():
        # Orphans of those that are killed here become children, so this ends only when nothing is left.
        children = [pid for pid in children_of(os.getpid()) if pid not in keep]
        if not children:
            break
        for child in children:
            _kill_tree(child)
        for child in children:
            if not _reap(child, deadline):
                return False
    return True


def _kill_tree(pid: int) -> None:
    below = children_of(pid)
    _kill(pid)  # first, so that it starts no more
    for child in below:
        _kill_tree(child)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's: a set-uid program
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int, deadline: float) -> bool:
    """Wait for the end of a child that was killed."""
    try:
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                return False
        finally:
            os.close(descriptor)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass  # reaped by someone else
    return True


def _set_process_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
