"""Process-wide thread settings that must be in place before a numeric library loads."""

import os

ALONE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "30000"}
"""How OpenMP's idle threads wait in a process that has its cores to itself: look for work for a while, then sleep."""
SHARING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
"""The same for the processes of a run, which share cores: they sleep sooner.

To sleep at once costs a wake-up at every operation, to spin without end starves the others (docs/log.md).
"""


def settle_waiting() -> None:
    """Let this process wait as one that has its cores to itself, unless its environment says otherwise."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
