"""Who places processes. A scheduler starts commands; the processes find the driver by dialling home."""

from pathlib import Path
from typing import Protocol

from areal.config.errors import ConfigError
from areal.infra.scheduler.base import Command
from areal.infra.scheduler.local import LocalScheduler

__all__ = ["SCHEDULERS", "Command", "LocalScheduler", "Placement", "Scheduler", "make_scheduler"]


class Placement(Protocol):
    """A process that was started."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def log_path(self) -> Path: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative = the signal that killed it."""
        ...

    async def wait(self) -> int:
        """Its return code, once it has ended."""
        ...

    def describe_exit(self) -> str:
        """One line for people: who ended, and how."""
        ...

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Ask it and its descendants to end; after the grace, make them."""
        ...


class Scheduler(Protocol):
    async def start(self, command: Command) -> Placement: ...

    async def close(self) -> None:
        """Stop whatever still runs."""
        ...


SCHEDULERS: dict[str, type[Scheduler]] = {"local": LocalScheduler}


def make_scheduler(name: str) -> Scheduler:
    if name not in SCHEDULERS:
        raise ConfigError(f"scheduler.type must be one of {', '.join(SCHEDULERS)}, got {name!r}")
    return SCHEDULERS[name]()
