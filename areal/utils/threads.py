"""Process-wide thread settings that must be in place before a numeric library loads."""

import os


def quiet_threads() -> None:
    """Let idle OpenMP threads sleep instead of spin: on a shared core spinning costs an order of magnitude."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
