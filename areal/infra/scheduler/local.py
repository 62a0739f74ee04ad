"""Processes on this machine. Each leads a session of its own, so that a process and its descendants end together.

A process that is frozen is killed: one that has ended can be noticed and replaced, one that hangs holds up everything.
When a process ends, what is left of its group is killed; when the driver ends, however that comes about, the guardian
kills every group and removes the scratch directories. A descendant that makes a session of its own is out of reach of
both.
"""

import asyncio
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from areal.api.errors import ProcessDied
from areal.infra.heartbeat import Heartbeat
from areal.infra.scheduler import guardian
from areal.infra.scheduler.base import Command, child_environment

STOP_SECONDS = 5.0
KILL_SECONDS = 5.0
LOG_TAIL_BYTES = 4096
SCRATCH_PREFIX = "areal-"


class LocalScheduler:
    """Starts commands on this machine and is responsible for them until `close`."""

    def __init__(self) -> None:
        self._guardian: _Guardian | None = None
        self._placements: list[LocalPlacement] = []
        self._scratch: list[Path] = []

    async def start(self, command: Command) -> "LocalPlacement":
        guardian = self._guardian = self._guardian or _Guardian()
        heartbeat = Heartbeat(command.heartbeat_seconds)
        try:
            with _open_log(command.log_path) as log, _filled_pipe(command.secret) as stdin:
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    stdin=stdin,
                    stdout=log,
                    stderr=log,
                    env=child_environment(os.environ) | command.env | heartbeat.env,
                    pass_fds=[heartbeat.inherited],
                    start_new_session=True,
                )
        except BaseException:
            heartbeat.close()
            raise
        placement = LocalPlacement(command, process, guardian, heartbeat)
        self._placements.append(placement)
        guardian.watch(placement.pid)
        return placement

    def scratch(self, parent: Path) -> Path:
        guardian = self._guardian = self._guardian or _Guardian()
        directory = parent.absolute() / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
        guardian.watch(directory)  # before it exists: a driver may be killed at any moment
        self._scratch.append(directory)
        directory.mkdir(mode=0o700)
        return directory

    async def close(self) -> None:
        await asyncio.gather(*(placement.stop() for placement in self._placements))
        self._placements.clear()
        for directory in self._scratch:
            shutil.rmtree(directory, ignore_errors=True)
        self._scratch.clear()
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.close)
            self._guardian = None


class LocalPlacement:
    """A process of this machine, until it has ended and been reaped."""

    def __init__(self, command: Command, process: Process, guardian: "_Guardian", heartbeat: Heartbeat) -> None:
        self.name = command.name
        self.pid = process.pid
        self.log_path = command.log_path
        self.host, self.address = socket.gethostname(), "127.0.0.1"
        self._process = process
        self._guardian = guardian
        self._heartbeat = heartbeat
        self._frozen = ""
        """Why it was killed as frozen; empty = it was not."""
        heartbeat.watch(self.pid, self._kill_frozen)
        self._end = asyncio.get_running_loop().create_task(self._until_end(), name=f"wait for {command.name}")

    @property
    def returncode(self) -> int | None:
        return self._end.result() if self._end.done() and not self._end.cancelled() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def describe_exit(self) -> str:
        who = f"{self.name} (pid {self.pid})"
        if self.returncode is None:
            return f"{who} is running"
        last = _last_line(self.log_path) if self.returncode else ""
        if self.returncode < 0:
            names = {known.value: f" ({known.name})" for known in signal.Signals}  # real-time signals have none
            killed = f"was killed by signal {-self.returncode}{names.get(-self.returncode, '')}"
            how = f"was frozen ({self._frozen}), so it was killed" if self._frozen else killed
            return f"{who} {how}" + (f"; its log {self.log_path} ends with: {last}" if last else "")
        return f"{who} exited with code {self.returncode}" + (f": {last} (log: {self.log_path})" if last else "")

    async def stop(self, grace_seconds: float = 5.0) -> None:
        for sign, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, KILL_SECONDS)):
            if self._end.done():
                return
            self._signal_group(sign)
            await asyncio.wait({self._end}, timeout=seconds)
        if not self._end.done():
            raise TimeoutError(f"{self.name} (pid {self.pid}) is still there {KILL_SECONDS} s after SIGKILL")

    async def _until_end(self) -> int:
        returncode = await self._process.wait()
        self._heartbeat.close()
        self._signal_group(signal.SIGKILL)
        self._guardian.release(self.pid)
        return returncode

    def _kill_frozen(self, why: str) -> None:
        self._frozen = why
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, sign: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.pid, sign)


class _Guardian:
    """Kills the process groups and removes the directories that it watches when the driver ends; runs guardian.py.

    A parent-death signal would not do: it is tied to the thread that forked, not to the process, and spares
    grandchildren.
    """

    def __init__(self) -> None:
        # A session of its own: a Ctrl-C or a kill that is meant for the driver's group must not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, what: int | Path) -> None:
        """A process group, or a directory."""
        try:
            self._write(f"+{what}\n")
        except BrokenPipeError:
            raise ProcessDied(
                f"the guardian (pid {self.pid}) has died, so processes could outlive the driver; restart the run"
            ) from None

    def release(self, group: int) -> None:
        with suppress(BrokenPipeError):  # without a guardian there is nothing to release
            self._write(f"-{group}\n")

    def close(self) -> None:
        """End the guardian; whatever it still watches is killed or removed."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()


def _open_log(path: Path) -> BinaryIO:
    """For its owner only, since a log may hold an admin key that was made for the run."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115  (the caller's)
    os.fchmod(log.fileno(), 0o600)  # an earlier run may have made it
    return log


@contextmanager
def _filled_pipe(content: bytes) -> Iterator[int]:
    """The end of a pipe to read the content from, and then its end."""
    assert len(content) <= select.PIPE_BUF, "more might block"
    output, fill = os.pipe()
    try:
        with open(fill, "wb") as pipe:
            pipe.write(content)
        yield output
    finally:
        os.close(output)


def _last_line(path: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
