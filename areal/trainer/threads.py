"""How the cores of the machine are shared between the engine and the trainer."""

import os
from dataclasses import dataclass


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
