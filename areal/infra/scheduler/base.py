"""What a scheduler is given and what it promises, and the part of it that differs between machines: the launcher.

Every command of a run is started by a keeper (keeper.py), a small program that connects to the driver, runs the one
command it is sent and ends with it. A `Launcher` only finds a place for keepers and starts them there. What follows is
the same everywhere and lives in scheduler.py: the command travels to its keeper, output and exit code come back.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from areal.config.keys import ADMIN_KEY_VARIABLE, ENGINE_SECRET_VARIABLE
from areal.utils.net import bypass_proxies
from areal.utils.threads import ALONE, SHARING


@dataclass(frozen=True)
class Ask:
    """What one command needs of its host."""

    name: str
    """The command's, which tells the asks of a run apart: a command that is started again takes its old place."""
    cpus: int = 0
    """0 = not stated: it shares what there is."""
    gpus: int | None = None
    """So many for itself alone; None = not stated: it sees what its host shows it."""
    memory_mib: int = 0
    """0 = not stated."""
    with_driver: bool = False
    """It is for what runs in the driver itself, so it must be on the driver's host if that has places to give."""
    together: str = ""
    """Those of the same name talk to each other all the time: as many as fit are on one host. Empty = anywhere."""


@dataclass(frozen=True)
class Command:
    """A process to be started."""

    name: str
    """What people call the process: `rollout worker 0`."""
    argv: list[str]
    log_path: Path
    """On the driver's host; both of its output streams are appended here."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the environment that its keeper has."""
    heartbeat_seconds: float | None = None
    """After this long without a heartbeat (see areal/infra/heartbeat.py) it is killed as frozen; None = never."""
    secret: bytes = b""
    """All that its standard input has. Arguments and environments can be read by other processes, this cannot."""
    ask: Ask | None = None
    """What was reserved for it; None = nothing in particular."""
    directories: tuple[str, ...] = ()
    """Made for it on its host, for its user only, and removed after its end, however that comes about."""
    shared: str = ""
    """A directory like those, which commands on one host have together: it is removed after the last of them."""


@dataclass(frozen=True)
class KeeperStart:
    """How a keeper is started. Its environment is `child_environment(os.environ)`, and what the place adds to it."""

    argv: list[str]
    """Nothing in it is secret."""
    stdin: bytes
    """All that its standard input has: the secret, then the end. It must appear nowhere else: not in arguments,
    environments, files, nor on a dashboard."""


class Launched(Protocol):
    """A keeper that was started, as the system that started it sees it."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done when the keeper is gone, with the reason as a phrase (`exited with code 1: …`); never an exception."""
        ...

    async def kill(self) -> None:
        """End it by force: it does not answer the driver. Harmless when it has ended."""
        ...


class Launcher(Protocol):
    """Finds places for keepers on one kind of system: this machine, a Slurm cluster, a Ray cluster."""

    @property
    def host(self) -> str:
        """The address of the driver's machine that keepers can reach, valid after `reserve` or the first `launch`.

        The driver listens there and nowhere else; `scheduler.address` overrides it.
        """
        ...

    async def reserve(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        """Places for all of them, or for none: then PlacementRefused, with what was asked for and what is free."""
        ...

    async def launch(self, ask: Ask, keeper: KeeperStart) -> Launched:
        """Start a keeper at the place that is reserved for this name; without one, at any that fits `ask`.

        Raises PlacementRefused if there is none. It returns as soon as the start is under way.
        """
        ...

    async def close(self) -> None:
        """Give every place back. All keepers have ended."""
        ...


class Placement(Protocol):
    """A process that was started."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int:
        """On its own host."""
        ...

    @property
    def host(self) -> str:
        """The name of its host."""
        ...

    @property
    def address(self) -> str:
        """Its host's end of the connection to the driver: where others on that network reach it."""
        ...

    @property
    def log_path(self) -> Path: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative = the signal that killed it."""
        ...

    @property
    def silence(self) -> tuple[float, float] | None:
        """For how many seconds it has shown no sign of life, and after how many more it is killed as frozen, unless it
        computes; None = it shows them."""
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


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` and what every process of a run needs."""
    # These are for the driver, which hands them on: agents run in these processes, and must not find them there.
    secret = {ADMIN_KEY_VARIABLE, ENGINE_SECRET_VARIABLE}
    alone = {name for name, value in ALONE.items() if environ.get(name) == value}
    chosen = {name: value for name, value in environ.items() if name not in secret | alone}
    return SHARING | {"PYTHONUNBUFFERED": "1"} | chosen | bypass_proxies(environ)
