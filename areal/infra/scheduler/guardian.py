"""A process that outlives the driver by an instant, to kill the process groups that the driver left running.

It reads `+PGID` and `-PGID` lines from its standard input. The end of the input is the driver's end, however it came
about (the kernel closes a killed process's pipes), and every group still listed then is killed. It uses the standard
library alone, so that it starts at once.
"""

import os
import signal
import sys


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in listed_at_the_end():
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def listed_at_the_end() -> set[int]:
    """The groups still listed when the driver is gone."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    return groups


if __name__ == "__main__":
    main()
