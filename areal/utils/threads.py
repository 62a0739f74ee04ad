"""Process-wide thread settings that must be in place before a numeric library loads."""

import os

OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
"""Idle threads look for work for some microseconds, then sleep.

To sleep at once costs a wake-up at every operation: with two threads a decode step of a 135M model took 93 ms, with
this 72, with endless spinning 52. But endless spinning made the same step 14 times slower (1,197 ms) when others used
the cores, and this did not.
"""


def quiet_threads() -> None:
    """Settle how OpenMP's threads wait, unless the user has."""
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)
