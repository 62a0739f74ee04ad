"""Keepers on this machine, and what of it is still free."""

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal.api.errors import PlacementRefused
from areal.infra.scheduler.base import Ask, KeeperStart, child_environment
from areal.infra.scheduler.scheduler import Scheduler

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_FILES = Path("/proc/driver/nvidia/gpus")
LAST_WORDS = 300
KILL_SECONDS = 8.0
"""How long the system may take to end a keeper that is killed."""


@dataclass
class FreeResources:
    """What of this machine nobody has been given."""

    cpus: int
    memory_mib: int
    gpus: list[str] = field(default_factory=list)
    """As CUDA names them."""

    @classmethod
    def this(cls, environ: Mapping[str, str]) -> "FreeResources":
        return cls(len(os.sched_getaffinity(0)), _available_memory_mib(), gpus_here(environ))

    def take(self, ask: Ask) -> list[str]:
        """Set aside what `ask` needs; the GPUs that it gets. Raises PlacementRefused, with nothing set aside."""
        wanted = {"CPUs": ask.cpus, "GPUs": ask.gpus or 0, "MiB of memory": ask.memory_mib}
        free = {"CPUs": self.cpus, "GPUs": len(self.gpus), "MiB of memory": self.memory_mib}
        short = [f"{wanted[what]} {what}, {free[what]} are free" for what in wanted if wanted[what] > free[what]]
        if short:
            raise PlacementRefused(
                f"{ask.name} must fit this machine, but needs {' and '.join(short)}; ask for less, or use a cluster "
                "(scheduler.type)"
            )
        self.cpus -= ask.cpus
        self.memory_mib -= ask.memory_mib
        given, self.gpus = self.gpus[: ask.gpus or 0], self.gpus[ask.gpus or 0 :]
        return given


class LocalLauncher:
    """A `Launcher`. What a name has been given stays its own until `close`."""

    host = "127.0.0.1"

    def __init__(self, machine: FreeResources | None = None) -> None:
        """`machine`: what there is; None = this machine, as it is when something is first asked for."""
        self._machine = machine
        self._gpus: dict[str, list[str]] = {}
        """Of each name that has a place."""

    async def reserve(self, asks: Sequence[Ask], timeout_seconds: float) -> None:
        machine = self._machine or FreeResources.this(os.environ)
        left = FreeResources(machine.cpus, machine.memory_mib, list(machine.gpus))
        places = {ask.name: left.take(ask) for ask in asks if ask.name not in self._gpus}
        self._machine = left
        self._gpus |= places

    async def launch(self, ask: Ask, keeper: KeeperStart) -> "LocalKeeper":
        await self.reserve([ask], 0.0)
        env = child_environment(os.environ)
        if ask.gpus is not None:
            env[VISIBLE_GPUS] = ",".join(self._gpus[ask.name])
        # A session of its own: a Ctrl-C that is meant for the driver's group must not reach it.
        process = await asyncio.create_subprocess_exec(
            *keeper.argv, stdin=PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=PIPE, env=env, start_new_session=True
        )
        return LocalKeeper(process, keeper.stdin)

    async def close(self) -> None:
        self._machine = None
        self._gpus.clear()


class LocalKeeper:
    """A `Launched`."""

    def __init__(self, process: Process, stdin: bytes) -> None:
        self._process = process
        self.ended: asyncio.Future[str] = asyncio.ensure_future(self._until_end(stdin))

    async def kill(self) -> None:
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait({self.ended}, timeout=KILL_SECONDS)

    async def _until_end(self, stdin: bytes) -> str:
        _, said = await self._process.communicate(stdin)
        code = self._process.returncode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        words = said.decode(errors="replace").strip()[-LAST_WORDS:]
        return f"{how}: {words}" if words else how


class LocalScheduler(Scheduler):
    """Every process on this machine."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__(LocalLauncher(), address)


def gpus_here(environ: Mapping[str, str]) -> list[str]:
    """This machine's, as CUDA names them; those that `environ` hides are none."""
    if VISIBLE_GPUS in environ:
        return [name.strip() for name in environ[VISIBLE_GPUS].split(",") if name.strip()]
    return [str(number) for number in range(len(list(GPU_FILES.iterdir())))] if GPU_FILES.is_dir() else []


def _available_memory_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0
