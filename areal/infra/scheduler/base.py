"""What a scheduler is given and what it promises."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Command:
    """A process to be started."""

    name: str
    """What people call the process: `rollout worker 0`."""
    argv: list[str]
    log_path: Path
    """Both of its output streams are appended here."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the environment of the process that starts it."""
    heartbeat_seconds: float | None = None
    """After this long without a heartbeat (see areal/infra/heartbeat.py) it is killed as frozen; None = never."""
    secret: bytes = b""
    """All that its standard input has. Arguments and environments can be read by other processes, this cannot."""


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
        """One line for people: which process ended, and how."""
        ...

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Ask it and its descendants to end; after the grace period, kill them."""
        ...


class Scheduler(Protocol):
    async def start(self, command: Command) -> Placement: ...

    def scratch(self, parent: Path) -> Path:
        """A new directory in `parent`, for this user only. It is removed at `close`, or when the driver is killed."""
        ...

    async def close(self) -> None:
        """Stop whatever still runs, and remove the scratch directories."""
        ...
