"""The program that stands between the driver and one command, on the command's host: `keeper.py ADDRESS NUMBER`.

It connects to the driver, is sent one command, runs it in a session of its own, and sends home what it prints, that it
is frozen, and how it ended. When the command ends, or the driver asks for that, or the connection is gone (the kernel
closes those of a killed driver, and notices a lost host within seconds), it kills every descendant of the command and
ends. As the adoptive parent of orphans it finds also those that have begun a session of their own.

Output is never held up: what comes faster than it can be sent is left out, except the last of it, and counted.

`keeper.py hold` runs no command: it only removes directories on the driver's own host once the driver is gone.

Everything it imports is of the standard library, and it is run by its path and without site-packages, so it starts at
once. The secret comes on its standard input; arguments and environment can be read by other processes.
"""

import json
import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.abspath(__file__).removesuffix("/areal/infra/scheduler/keeper.py"))

import fcntl
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO

from areal.infra.heartbeat import VARIABLE, FreezeWatch
from areal.infra.rpc.frames import FrameError, HandshakeRefused, Seals, call, notice_loss
from areal.utils.process_pool.descendants import adopt_orphans, die_with_parent, end_descendants

HELLO, STARTED, REFUSED, OUTPUT, FROZEN, EXIT, PING, COMMAND, STOP = (bytes([number]) for number in range(9))
"""The first byte of a frame's content. JSON follows, except for OUTPUT, FROZEN and REFUSED (text).

A PING says for how long no heartbeat has come.

HELLO, STARTED, REFUSED, OUTPUT, FROZEN, EXIT and PING are the keeper's, COMMAND and STOP are the driver's.
"""
PING_SECONDS = 2.0
CONNECT_SECONDS = 30.0
COMMAND_SECONDS = 60.0
"""How long the driver may take to send the command."""
TERM_SECONDS = 5.0
"""The grace period of a keeper that is itself asked to end, by a batch system for example."""
GOODBYE_SECONDS = 3.0
"""How long the last frames may take."""
HOLD_SECONDS = 5.0
CHUNK_BYTES = 1 << 16
UNSENT_BYTES = 1 << 20
"""Beyond this the connection is too slow for more output."""
BYTES_PER_SECOND = 4 << 20
"""What output may take of the driver's time; a second's worth may come at once."""
TAIL_BYTES = 1 << 14
"""Of the output that has to wait, this much is kept: its end, where a process says why it dies."""


class Keeper:
    """One command and one connection, from the greeting to the end."""

    def __init__(self, connection: socket.socket, seals: Seals) -> None:
        self._connection = connection
        self._sealer, self._opener = seals
        self._selector = selectors.DefaultSelector()
        self._unsent = bytearray()
        self._output = _Output(time.monotonic())
        self._printed = -1
        """The end of the pipe that the command's output is read from."""
        self._beats = -1
        """The same for its heartbeats."""
        self._watch: FreezeWatch | None = None
        self._command: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._refused = ""
        """Why the command could not be started."""
        self._directories: list[str] = []
        self._shared: _SharedDirectory | None = None
        self._kill_at = float("inf")
        self._command_by = time.monotonic() + COMMAND_SECONDS
        self._ping_at = float("inf")
        self._lost = False

    def run(self, number: int) -> None:
        woken = _wake_on_signals()
        self._connection.setblocking(False)
        self._selector.register(self._connection, selectors.EVENT_READ, self._receive)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._on_signals(woken.recv(4096)))
        address = self._connection.getsockname()[0]
        self._send(HELLO, {"number": number, "host": socket.gethostname(), "pid": os.getpid(), "address": address})
        try:
            while self._code is None and not self._refused and not self._lost:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        """Wait for the next thing to do, and do it."""
        now = time.monotonic()
        due = [self._ping_at, self._kill_at]
        due += [self._output.due] if self._may_send_output else []
        due += [self._watch.due] if self._watch is not None else []
        due += [self._command_by] if self._command is None else []
        for key, _ in self._selector.select(max(0.0, min(due) - now)):
            key.data()
        now = time.monotonic()
        if now >= self._ping_at:
            silent = None if self._watch is None else self._watch.silent_seconds(now)
            self._send(PING, {"silent_seconds": silent})
            self._ping_at = now + PING_SECONDS
        if self._command is None and now >= self._command_by:
            self._lost = True
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._signal(signal.SIGKILL)
        if self._watch is not None and now >= self._watch.due and (why := self._watch.check(now)):
            self._watch = None
            self._send(FROZEN, why.encode())
            self._signal(signal.SIGKILL)
        if self._may_send_output and (chunk := self._output.take(now)):
            self._send(OUTPUT, chunk)

    def _receive(self) -> None:
        try:
            chunk = self._connection.recv(CHUNK_BYTES)
            contents = self._opener.feed(chunk)
        except BlockingIOError:
            return
        except (OSError, FrameError):
            self._lost = True
            return
        for content in contents:
            kind, words = content[:1], json.loads(content[1:])
            if kind == COMMAND and self._command is None:
                self._start(**words)
            elif kind == STOP:
                self._stop(**words)
        self._lost = self._lost or not chunk

    def _start(
        self,
        argv: list[str],
        env: dict[str, str],
        stdin: str,
        heartbeat_seconds: float | None,
        directories: list[str],
        shared: str = "",
    ) -> None:
        self._printed, printing = os.pipe()
        self._beats, beating = os.pipe()
        given, giving = os.pipe()
        try:
            for directory in directories:
                os.mkdir(directory, 0o700)
                self._directories.append(directory)  # only now: one that was there is not ours to remove
            if shared:
                self._shared = _SharedDirectory(shared)
            with open(giving, "wb") as pipe:
                pipe.write(bytes.fromhex(stdin))
            self._command = subprocess.Popen(
                argv,
                stdin=given,
                stdout=printing,
                stderr=printing,
                env={**os.environ, **env, VARIABLE: str(beating)},
                pass_fds=[beating],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._refused = str(error)
            return
        finally:
            for end in (printing, beating, given):
                os.close(end)
        for end, read in ((self._printed, self._read_output), (self._beats, self._read_beats)):
            os.set_blocking(end, False)
            self._selector.register(end, selectors.EVENT_READ, read)
        if heartbeat_seconds is not None:
            self._watch = FreezeWatch(self._command.pid, heartbeat_seconds, time.monotonic())
        self._send(STARTED, {"pid": self._command.pid})
        self._ping_at = time.monotonic() + PING_SECONDS

    def _stop(self, grace_seconds: float) -> None:
        if self._command is None:
            self._lost = True
            return
        self._signal(signal.SIGTERM)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)

    def _signal(self, sign: signal.Signals) -> None:
        """To the command's group; what is outside of that is killed at the end."""
        if self._command is not None:
            with suppress(ProcessLookupError):  # all of it has ended
                os.killpg(self._command.pid, sign)

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self._stop(TERM_SECONDS)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # the command, or an orphan
                if self._command is not None and ended[0] == self._command.pid:
                    self._code = os.waitstatus_to_exitcode(ended[1])
                    self._command.returncode = self._code

    def _read_beats(self) -> None:
        if not os.read(self._beats, CHUNK_BYTES):
            self._selector.unregister(self._beats)
        elif self._watch is not None:
            self._watch.beat(time.monotonic())

    def _read_output(self) -> bool:
        """Whether there may be more."""
        try:
            chunk = os.read(self._printed, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._selector.unregister(self._printed)
        self._output.add(chunk)
        return bool(chunk)

    @property
    def _may_send_output(self) -> bool:
        return len(self._unsent) < UNSENT_BYTES

    def _send(self, kind: bytes, content: "bytes | dict[str, Any]" = b"") -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._unsent += self._sealer.seal(kind + content)
        self._flush()

    def _flush(self) -> None:
        events = selectors.EVENT_READ
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lost = True
            return
        if self._unsent:
            events |= selectors.EVENT_WRITE
        self._selector.modify(self._connection, events, self._exchange)

    def _exchange(self) -> None:
        """The connection can be read from, or written to."""
        if self._unsent:
            self._flush()
        self._receive()

    def _end(self) -> None:
        """Leave nothing behind, then say how the command ended, if there is someone to say it to."""
        self._signal(signal.SIGKILL)  # also where the kernel does not list descendants
        complete = end_descendants()
        _remove(self._directories)
        if self._shared is not None:
            self._shared.leave()
        if self._refused:
            self._send(REFUSED, self._refused.encode())
        elif self._code is not None:
            while self._printed in self._selector.get_map() and self._read_output():
                pass
            if rest := self._output.rest():
                self._send(OUTPUT, rest)
            self._send(EXIT, {"code": self._code, "complete": complete})
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Wait until the driver has read everything: closing at once could cost it the last frames."""
        self._connection.settimeout(GOODBYE_SECONDS)
        with suppress(OSError):
            self._connection.sendall(self._unsent)
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(CHUNK_BYTES):
                pass
        self._connection.close()


class _SharedDirectory:
    """A directory of several commands, each with a keeper of its own. All of these have a lock on it that others can
    have too; whoever can have it alone is the last, and removes the directory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        while self._descriptor < 0:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            with suppress(FileNotFoundError):  # the last of others has just removed it
                self._descriptor = self._joined()
        if os.fstat(self._descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")

    def _joined(self) -> int:
        """Its descriptor with the lock; negative if it was removed meanwhile."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        return -1

    def leave(self) -> None:
        with suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove([self._path])
        os.close(self._descriptor)


class _Output:
    """What the command has printed and the driver has not got yet: at most so much a second, and a tail of the rest."""

    def __init__(self, now: float) -> None:
        self._pending = bytearray()
        self._left_out = 0
        self._allowed = float(BYTES_PER_SECOND)
        self._at = now

    @property
    def due(self) -> float:
        """When there is something to send; never, if there is nothing."""
        return self._at + max(0.0, TAIL_BYTES - self._allowed) / BYTES_PER_SECOND if self._pending else float("inf")

    def add(self, chunk: bytes) -> None:
        self._pending += chunk
        surplus = len(self._pending) - TAIL_BYTES - CHUNK_BYTES
        if surplus > 0:
            del self._pending[:surplus]
            self._left_out += surplus

    def take(self, now: float) -> bytes:
        """What may be sent now."""
        self._allowed = min(BYTES_PER_SECOND, self._allowed + (now - self._at) * BYTES_PER_SECOND)
        self._at = now
        if not self._pending or self._allowed < min(len(self._pending), TAIL_BYTES):
            return b""
        self._allowed -= len(self._pending)
        return self.rest()

    def rest(self) -> bytes:
        note = f"\n[{self._left_out} bytes of output are left out here: they came too fast]\n" if self._left_out else ""
        rest = note.encode() + bytes(self._pending)
        self._pending.clear()
        self._left_out = 0
        return rest


def _wake_on_signals() -> socket.socket:
    """A socket that gets the number of each signal as a byte. Handlers, since commands would inherit a disregard."""
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)
    return woken


def keep(address: str, number: int) -> None:
    """Connect to the driver, and do what it says."""
    secret = sys.stdin.buffer.read()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    adopt_orphans()
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        notice_loss(connection)
        stream = connection.makefile("rb", buffering=0)
        seals = call(secret, lambda size: _read_exactly(stream, size), connection.sendall)
    except (OSError, HandshakeRefused) as error:
        sys.exit(f"the keeper cannot connect to the driver at {address}: {error}")
    Keeper(connection, seals).run(number)


def _read_exactly(stream: Any, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = stream.read(size - len(received))
        if not chunk:
            raise HandshakeRefused("it disconnected during the handshake; the secrets may differ")
        received += chunk
    return received


def hold(lines: BinaryIO) -> None:
    """Wait for the end of the input, which is the driver's end however it came about; then remove what it listed.

    A line is a directory (text), or a process (number) that may write to them and is therefore waited for.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directories: list[str] = []
    writers: list[int] = []
    for line in lines:
        what = json.loads(line)
        if isinstance(what, str):
            directories.append(what)
        else:
            with suppress(ProcessLookupError):
                writers.append(os.pidfd_open(what))
    _wait_for(writers)
    _remove(directories)


def _remove(directories: Iterable[str]) -> None:
    import shutil  # it takes a while to load, and only the end needs it

    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(processes: Iterable[int]) -> None:
    left, deadline = set(processes), time.monotonic() + HOLD_SECONDS
    while left and (rest := deadline - time.monotonic()) > 0:
        left -= set(select.select(left, [], [], rest)[0])


if __name__ == "__main__":
    if sys.argv[1:] == ["hold"]:
        hold(sys.stdin.buffer)
    else:
        keep(sys.argv[1], int(sys.argv[2]))
