"""Whether a process ends, for the tests of several packages."""

import os
import select


def ended_within(pid: int, seconds: float) -> bool:
    """Whether that process ends; one that was killed does so in its own time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
