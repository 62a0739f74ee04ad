"""How many threads a process computes with, and how its idle threads wait.

`settle_waiting` must be called before a numeric library loads.
"""

import os
from dataclasses import dataclass

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


@dataclass(frozen=True)
class ThreadPlan:
    engine: int
    trainer: int
    reason: str


def plan_threads(max_head_offpolicyness: int, each: int | None = None) -> ThreadPlan:
    """Threads for each side; when they never work at the same time, each gets every core. `each` overrules that."""
    if each is not None:
        return ThreadPlan(each, each, f"scheduler.threads={each}: so many for the engine and for the trainer")
    cores = len(os.sched_getaffinity(0))
    if max_head_offpolicyness == 0:
        return ThreadPlan(cores, cores, f"{cores} cores, engine and trainer take turns: all cores for each")
    engine = max(1, cores // 2)
    trainer = max(1, cores - engine)
    return ThreadPlan(engine, trainer, f"{cores} cores, engine and trainer work side by side: {engine} and {trainer}")
