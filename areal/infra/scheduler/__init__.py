"""Where processes run. A scheduler starts commands; the processes then connect to the driver."""

from collections.abc import Callable

from areal.config.errors import ConfigError
from areal.infra.scheduler.base import Ask, Command, Placement
from areal.infra.scheduler.local import LocalScheduler
from areal.infra.scheduler.scheduler import Scheduler

__all__ = ["SCHEDULERS", "Ask", "Command", "LocalScheduler", "Placement", "Scheduler", "make_scheduler"]

SCHEDULERS: dict[str, Callable[[str | None], Scheduler]] = {"local": LocalScheduler}
"""By `scheduler.type`; each takes `scheduler.address`."""


def make_scheduler(name: str, address: str | None = None) -> Scheduler:
    if name not in SCHEDULERS:
        raise ConfigError(f"scheduler.type must be one of {', '.join(SCHEDULERS)}, got {name!r}")
    return SCHEDULERS[name](address)
