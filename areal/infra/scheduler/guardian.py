"""A process that outlives the driver by an instant, to end and remove what the driver left behind.

It reads lines from its standard input: `+PGID` and `-PGID` for process groups, `+PATH` for directories. The end of the
input is the driver's end, however it came about (the kernel closes a killed process's pipes). Every group still listed
then is killed, and after that every directory is removed. It uses the standard library alone, to start at once.
"""

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

KILL_SECONDS = 5.0


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups, directories = listed_at_the_end()
    kill(groups)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def listed_at_the_end() -> tuple[set[int], list[str]]:
    """The groups and the directories still listed when the driver is gone."""
    groups: set[int] = set()
    directories: list[str] = []
    for line in sys.stdin:
        sign, what = line[0], line[1:-1]
        if what.startswith("/"):
            directories.append(what)
        elif sign == "+":
            groups.add(int(what))
        else:
            groups.discard(int(what))
    return groups, directories


def kill(groups: Iterable[int]) -> None:
    """Kill them and wait for the end of their leaders, which may be writing into the directories."""
    leaders = []
    for group in groups:
        with suppress(ProcessLookupError):
            leaders.append(os.pidfd_open(group))
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for leader in leaders:
        select.select([leader], [], [], KILL_SECONDS)


if __name__ == "__main__":
    main()
