"""Starts the commands of a run and is responsible for them: the driver's half, the same on every kind of system.

A launcher starts a keeper (keeper.py) for each command; the keeper connects here, gets its command, and reports. A
process that is frozen is killed: one that has ended can be noticed and replaced, one that hangs holds up everything.
A keeper that is not heard of any more has lost its host or itself; its process counts as dead, and the keeper, if it
lives, ends it. However the driver ends, the keepers end every process, and the scratch directories are removed.
"""

import asyncio
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from areal.api.errors import ProcessDied
from areal.infra.rpc.frames import FrameError, Seals
from areal.infra.rpc.sockets import HANDSHAKE_SECONDS, Door, listen
from areal.infra.scheduler import keeper
from areal.infra.scheduler.base import Ask, Command, KeeperStart, Launched, Launcher
from areal.utils import waits
from areal.utils.logging import getLogger

KEEPER_SECONDS = 60.0
"""How long a keeper may take to connect."""
STOP_SECONDS = 5.0
KILL_SECONDS = 8.0
"""How long a keeper may take to end its command by force, and itself."""
CAUSE_SECONDS = 1.0
"""A broken connection is noticed before what broke it; how long to wait for the better explanation."""
SILENT_SECONDS = 9.0
"""After so long without a word a keeper is lost; it says something every two seconds."""
QUIET_SECONDS = 4.0
"""A heartbeat comes every second, and its keeper tells of it every two; whoever is silent for longer is quiet."""
CHUNK_BYTES = 1 << 18
LOG_TAIL_BYTES = 4096
SCRATCH_PREFIX = "areal-"
logger = getLogger("scheduler")


class Scheduler:
    """Belongs to the event loop that `start` is called on. `scratch` may be called before there is one."""

    def __init__(self, launcher: Launcher, address: str | None = None) -> None:
        """`address`: where this machine is reached by its keepers; None = the launcher knows."""
        self._launcher = launcher
        self._address = address
        self._secret = secrets.token_hex(32).encode()
        self._door = Door("the scheduler", self._secret)
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._served_at = ""
        self._opening = asyncio.Lock()
        self._has_reserved = False
        self._arriving: dict[int, asyncio.Future[_Line]] = {}
        """By the keeper's number, until it has connected."""
        self._placements: list[KeptProcess] = []
        self._scratch = _Scratch()

    @property
    def host(self) -> str:
        """The address of this machine where the processes of the run reach the driver; valid after `reserve`."""
        return self._address or self._launcher.host

    async def reserve(self, asks: Sequence[Ask], timeout_seconds: float = 60.0) -> None:
        """Places for all of them, or PlacementRefused. Whoever asks for nothing in particular may leave it out."""
        await self._launcher.reserve(asks, timeout_seconds)
        self._has_reserved = True

    async def start(self, command: Command) -> "KeptProcess":
        """Returns when the command runs. Raises PlacementRefused, or ProcessDied if it cannot be started."""
        assert len(command.secret) <= select.PIPE_BUF, "more might block"
        log = _open_log(command.log_path)
        number = next(self._numbers)
        self._arriving[number] = asyncio.get_running_loop().create_future()
        launched: Launched | None = None
        line: _Line | None = None
        try:
            ask = command.ask or Ask(command.name)
            await self._open(ask)
            argv = [sys.executable, "-I", "-S", keeper.__file__, self._served_at, str(number)]
            launched = await self._launcher.launch(ask, KeeperStart(argv, self._secret))
            line = await self._arrival(command, number, launched)
            process = KeptProcess(command, line, launched, log)
            await process.begin(command)
        except BaseException:
            log.close()
            if line is not None:
                line.close()  # its keeper then leaves nothing behind
            if launched is not None:
                await _until_gone(launched, KILL_SECONDS if line is not None else 0.0)
            raise
        finally:
            self._arriving.pop(number)
        if line.host == socket.gethostname():
            self._scratch.outlive(line.pid)
        self._placements.append(process)
        return process

    def scratch(self, parent: Path) -> Path:
        """A new directory in `parent`, for this user only. It is removed at `close`, or when the driver is killed."""
        return self._scratch.make(parent)

    async def close(self) -> None:
        """Stop whatever still runs, give back the places, and remove the scratch directories."""
        try:
            await asyncio.gather(*(placement.stop() for placement in self._placements))
            await asyncio.gather(*(placement.until_gone() for placement in self._placements))
        finally:
            self._placements.clear()
            if self._server is not None:
                self._server.close()
                self._server = None
            await self._launcher.close()
            await asyncio.to_thread(self._scratch.close)

    async def _open(self, first: Ask) -> None:
        """Listen for keepers, at the address that reserving has shown to be right."""
        async with self._opening:
            if not self._has_reserved:
                await self.reserve([first])
            if self._server is None:
                self._server, self._served_at = await listen(f"tcp:{self.host}:0", self._accept)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        admitted = await self._door.admit(reader, writer)
        if admitted is None:
            return
        line = _Line(reader, writer, admitted[1])
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                kind, content = await line.next()
                hello = json.loads(content) if kind == keeper.HELLO else {}
                arriving = self._arriving[hello["number"]]
                line.host, line.pid, line.address = hello["host"], hello["pid"], hello["address"]
        except (ValueError, OSError, EOFError, KeyError) as error:
            logger.warning("refused a connection to the scheduler: %s", str(error) or type(error).__name__)
            writer.close()
            return
        if arriving.done():
            writer.close()
        else:
            arriving.set_result(line)

    async def _arrival(self, command: Command, number: int, launched: Launched) -> "_Line":
        arriving = self._arriving[number]
        either: set[asyncio.Future[Any]] = {arriving, launched.ended}
        with waits.current().entered("waits for its keeper, which finds it a place", KEEPER_SECONDS):
            await asyncio.wait(either, timeout=KEEPER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if arriving.done():
            return arriving.result()
        arriving.cancel()
        why = launched.ended.result() if launched.ended.done() else f"has not connected within {KEEPER_SECONDS:g} s"
        raise ProcessDied(f"{command.name} cannot be started: its keeper {why}")


class KeptProcess:
    """A command that a keeper runs; a `Placement`."""

    def __init__(self, command: Command, line: "_Line", launched: Launched, log: BinaryIO) -> None:
        self.name = command.name
        self.pid = 0
        self.host = line.host
        self.address = line.address
        self.log_path = command.log_path
        self._line = line
        self._launched = launched
        self._log = log
        self._is_log_full = False
        self._how = ""
        """Why it was killed, or lost; empty = it ended by itself."""
        self._beat_at: float | None = None
        """When its keeper heard of it last; None = that is not known."""
        self._heartbeat_seconds = command.heartbeat_seconds
        self._end: asyncio.Task[int] | None = None
        self._leaving: asyncio.Task[None] | None = None
        """The end of a keeper that was lost."""

    async def begin(self, command: Command) -> None:
        """Have the keeper start the command, and follow it from then on."""
        words: dict[str, Any] = {
            "argv": command.argv,
            "env": command.env,
            "stdin": command.secret.hex(),
            "heartbeat_seconds": command.heartbeat_seconds,
            "directories": list(command.directories),
            "shared": command.shared,
        }
        self._line.send(keeper.COMMAND, words)
        try:
            kind, content = await asyncio.wait_for(self._line.next(), KEEPER_SECONDS)
        except (EOFError, OSError, FrameError) as error:
            why = await self._why_lost(error)
            raise ProcessDied(f"{self.name} cannot be started on {self.host}: {why}") from None
        if kind != keeper.STARTED:
            raise ProcessDied(f"{self.name} cannot be started on {self.host}: {content.decode(errors='replace')}")
        self.pid = json.loads(content)["pid"]
        self._end = asyncio.get_running_loop().create_task(self._until_end(), name=f"wait for {self.name}")

    @property
    def silence(self) -> tuple[float, float] | None:
        silent = 0.0 if self._beat_at is None else time.monotonic() - self._beat_at
        if self._heartbeat_seconds is None or silent < QUIET_SECONDS or self._running.done():
            return None
        return silent, max(0.0, self._heartbeat_seconds - silent)

    @property
    def returncode(self) -> int | None:
        end = self._running
        return end.result() if end.done() and not end.cancelled() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._running)

    def describe_exit(self) -> str:
        elsewhere = "" if self.host == socket.gethostname() else f" on {self.host}"
        who = f"{self.name} (pid {self.pid}{elsewhere})"
        if self.returncode is None:
            return f"{who} is running"
        last = _last_line(self.log_path) if self.returncode else ""
        if self.returncode < 0:
            names = {known.value: f" ({known.name})" for known in signal.Signals}  # real-time signals have none
            killed = f"was killed by signal {-self.returncode}{names.get(-self.returncode, '')}"
            return f"{who} {self._how or killed}" + (f"; its log {self.log_path} ends with: {last}" if last else "")
        return f"{who} exited with code {self.returncode}" + (f": {last} (log: {self.log_path})" if last else "")

    async def stop(self, grace_seconds: float = 5.0) -> None:
        if self._running.done():
            return
        self._line.send(keeper.STOP, {"grace_seconds": grace_seconds})
        await asyncio.wait({self._running}, timeout=grace_seconds + KILL_SECONDS)
        if not self._running.done():
            await self._launched.kill()
            await asyncio.wait({self._running}, timeout=KILL_SECONDS)
        if not self._running.done():
            raise TimeoutError(
                f"{self.name} (pid {self.pid} on {self.host}) cannot be ended; its keeper does not answer"
            )

    async def until_gone(self) -> None:
        """Wait for the end of the keeper, too."""
        if self._leaving is not None:
            await asyncio.gather(self._leaving, return_exceptions=True)
        await _until_gone(self._launched, KILL_SECONDS)

    @property
    def _running(self) -> asyncio.Task[int]:
        assert self._end is not None, "begin() comes first"
        return self._end

    async def _until_end(self) -> int:
        try:
            while True:
                kind, content = await self._line.next_in_time(SILENT_SECONDS)
                if kind == keeper.OUTPUT:
                    self._write(content)
                elif kind == keeper.PING:
                    silent = json.loads(content)["silent_seconds"]
                    self._beat_at = None if silent is None else time.monotonic() - silent
                elif kind == keeper.FROZEN:
                    self._how = f"was frozen ({content.decode(errors='replace')}), so it was killed"
                elif kind == keeper.EXIT:
                    words = json.loads(content)
                    if not words["complete"]:
                        logger.warning(
                            "%s left a process on %s that does not end even when killed", self.name, self.host
                        )
                    return int(words["code"])
        except (EOFError, OSError, FrameError) as error:
            self._how = f"was lost with its keeper: {await self._why_lost(error)}"
            # A keeper that lives ends by itself now. One that is frozen would keep its command, and its place.
            self._leaving = asyncio.get_running_loop().create_task(_until_gone(self._launched, KILL_SECONDS))
            return -signal.SIGKILL
        finally:
            self._log.close()
            self._line.close()

    async def _why_lost(self, error: Exception) -> str:
        await asyncio.wait({self._launched.ended}, timeout=CAUSE_SECONDS)
        if self._launched.ended.done():
            return f"the keeper {self._launched.ended.result()}"
        return str(error) or type(error).__name__

    def _write(self, output: bytes) -> None:
        try:
            self._log.write(output)
            self._log.flush()
        except OSError as error:  # a full disk must not look like the death of a process
            if not self._is_log_full:
                logger.warning("the log %s is incomplete from here on: %s", self.log_path, error)
            self._is_log_full = True


class _Line:
    """The connection of one keeper, and what it said about itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals) -> None:
        self.host = ""
        self.pid = 0
        self.address = ""
        self._reader = reader
        self._writer = writer
        self._sealer, self._opener = seals
        self._received: list[bytes] = []

    async def next(self) -> tuple[bytes, bytes]:
        """The next message, as its kind and content. Raises EOFError at the end of the connection."""
        while not self._received:
            chunk = await self._reader.read(CHUNK_BYTES)
            if not chunk:
                raise EOFError("the connection was closed")
            self._received = self._opener.feed(chunk)
        content = self._received.pop(0)
        return content[:1], content[1:]

    async def next_in_time(self, seconds: float) -> tuple[bytes, bytes]:
        """The same, or TimeoutError."""
        if self._received:
            return await self.next()
        for _ in range(2):  # if this process was itself stopped for a while, there may be something after all
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.next(), seconds / 2)
        raise TimeoutError(f"nothing was heard of it for {seconds:g} s; its host may be lost")

    def send(self, kind: bytes, words: dict[str, Any]) -> None:
        self._writer.write(self._sealer.seal(kind + json.dumps(words).encode()))

    def close(self) -> None:
        self._writer.close()


class _Scratch:
    """Directories of the driver's own host, which a keeper without a command removes if the driver is killed."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        self._directories: list[Path] = []

    def make(self, parent: Path) -> Path:
        directory = parent.absolute() / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
        if self._holder is None:
            # A session of its own: a Ctrl-C or a kill that is meant for the driver's group must not reach it.
            self._holder = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, "hold"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._tell(str(directory))  # before it exists: a driver may be killed at any moment
        except BrokenPipeError:
            raise ProcessDied(
                f"the keeper of scratch directories (pid {self._holder.pid}) has died, so files could outlive the "
                "driver; restart the run"
            ) from None
        self._directories.append(directory)
        directory.mkdir(mode=0o700)
        return directory

    def outlive(self, pid: int) -> None:
        """Directories are removed after the end of this process, which may write to them."""
        with suppress(BrokenPipeError):
            self._tell(pid)

    def close(self) -> None:
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
        self._directories.clear()
        if self._holder is None:
            return
        assert self._holder.stdin is not None
        with suppress(BrokenPipeError):
            self._holder.stdin.close()
        try:
            self._holder.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            with suppress(subprocess.TimeoutExpired):
                self._holder.wait(STOP_SECONDS)
        self._holder = None

    def _tell(self, what: str | int) -> None:
        if self._holder is not None:
            assert self._holder.stdin is not None
            self._holder.stdin.write(json.dumps(what).encode() + b"\n")
            self._holder.stdin.flush()


async def _until_gone(launched: Launched, seconds: float) -> None:
    """Wait for the end of a keeper; end it by force if it takes longer."""
    await asyncio.wait({launched.ended}, timeout=seconds)
    if not launched.ended.done():
        await launched.kill()


def _open_log(path: Path) -> BinaryIO:
    """For its owner only, since a log may hold an admin key that was made for the run."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115  (the caller's)
    os.fchmod(log.fileno(), 0o600)  # an earlier run may have made it
    return log


def _last_line(path: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:  # how a process ended is told even if its log cannot be read
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
