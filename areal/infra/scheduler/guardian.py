"""A process that outlives the driver by an instant: it kills the process groups that the driver leaves behind.

It reads `+PGID` and `-PGID` lines from its standard input. The end of the input is the driver's end, however it came
about (the kernel closes a killed process's pipes), and whatever is still listed then is killed. It is a script of the
standard library alone, so that it starts at once.
"""

import os
import signal
import sys


def read_groups() -> set[int]:
    """The groups still listed when the driver is gone."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    return groups


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in read_groups():
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
