"""Where processes run. A scheduler starts commands; the processes then connect to the driver."""

from areal.config.errors import ConfigError
from areal.infra.scheduler.base import Command, Placement, Scheduler
from areal.infra.scheduler.local import LocalScheduler

__all__ = ["SCHEDULERS", "Command", "LocalScheduler", "Placement", "Scheduler", "make_scheduler"]

SCHEDULERS: dict[str, type[Scheduler]] = {"local": LocalScheduler}


def make_scheduler(name: str) -> Scheduler:
    if name not in SCHEDULERS:
        raise ConfigError(f"scheduler.type must be one of {', '.join(SCHEDULERS)}, got {name!r}")
    return SCHEDULERS[name]()
