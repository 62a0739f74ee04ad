"""How many threads a process computes with, and how its idle threads wait.

`settle_waiting` must be called before a numeric library loads.
"""

import os
from dataclasses import dataclass

ALONE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "30000"}
"""How OpenMP's idle threads wait in a process that has its cores to itself: they spin for a while, then sleep."""
SHARING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
"""The same for the processes of a run, which share cores: they sleep sooner.

Sleeping at once costs a wake-up at every operation, spinning without end starves the others (docs/log.md).
"""


def settle_waiting() -> None:
    """Set this process up as one that has its cores to itself, unless its environment says otherwise."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class ThreadPlan:
    """How many threads each side computes with."""

    engine: int
    trainer: int
    reason: str
    """For the log."""


def plan_threads(max_head_offpolicyness: int, each: int | None = None) -> ThreadPlan:
    """Share out the cores; when the two sides never work at the same time, each gets all. `each` overrides that."""
    if each is not None:
        return ThreadPlan(each, each, f"scheduler.threads={each}: {each} for the engine and {each} for the trainer")
    cores = len(os.sched_getaffinity(0))
    if max_head_offpolicyness == 0:
        return ThreadPlan(cores, cores, f"{cores} cores: engine and trainer take turns, each on all of them")
    engine = max(1, cores // 2)
    trainer = max(1, cores - engine)
    reason = f"{cores} cores: {engine} for the engine and {trainer} for the trainer, which work at the same time"
    return ThreadPlan(engine, trainer, reason)
