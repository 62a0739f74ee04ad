"""One worker process seen from its parent: start it, give it functions, begin calls in it, end it.

Used by the one thread that made it, except for `kill`, which any thread may call. That thread must outlive it: Linux
sends a worker its parent-death signal when the *thread* that started it ends.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from areal.utils.process_pool.calls import CallFailed, LoadFailed, PackedFunction
from areal.utils.process_pool.channel import PoolChannel, PoolChannelClosed, PoolFrame, Tickets

# A command, not multiprocessing, so that scripts without a main guard work. The search path comes by argument and not
# by PYTHONPATH, which the user's own sub-processes would inherit.
_BOOTSTRAP = (
    "import sys; own, sys.path[:] = sys.argv[1:5], sys.argv[5:]; del sys.argv[1:]; "
    "from areal.utils.process_pool.worker import main; main(*map(int, own[:3]), float(own[3]))"
)
_MAX_FUNCTIONS = 64
_MAX_BATCH = 1 << 12
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    memory_bytes: int | None = None
    """Private memory of each worker process; None = no limit."""
    cpu_seconds: float | None = None
    """CPU time of one call, rounded up to whole seconds; None = no limit."""


class Child:
    def __init__(self, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._channel = PoolChannel(ours)
        self._tickets = Tickets.new()
        self._functions: set[bytes] = set()
        self._warming: PackedFunction | None = None
        self._lock = threading.Lock()
        self._ended = False
        self.usable = True
        """False once it was killed or died: end it and start another."""
        with theirs:
            try:
                self._process = _start(theirs.fileno(), self._tickets.read_fd, limits)
            except OSError:
                ours.close()
                self._tickets.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def knows(self, function: PackedFunction) -> bool:
        """Whether it has loaded that function."""
        return function.digest in self._functions

    def warm(self, function: PackedFunction, deadline: float) -> None:
        """Let it import what `function` needs while there is nothing to do; says nothing if that fails."""
        with suppress(PoolChannelClosed, TimeoutError):  # whoever calls it next will learn
            self._send_load(function, deadline)
            self._warming = function

    def begin(self, function: PackedFunction, bodies: list[bytes], deadline: float) -> None:
        """Load the function and these arguments and begin the first call. Raises LoadFailed if it cannot be loaded."""
        self._finish_warming(function, deadline)
        if not self.knows(function):
            self._send_load(function, deadline)
            self._finish_load(function, deadline)
        assert len(bodies) <= _MAX_BATCH
        self._tickets.put(len(bodies) - 1)
        self._channel.send(PoolFrame.BATCH, function.digest + pickle.dumps(bodies), deadline)
        self._expect(PoolFrame.STARTED, function, deadline)

    def reply(self, function: PackedFunction, deadline: float) -> Any:
        """The result of the call that was begun first and not replied to yet. Raises CallFailed if it raised."""
        packed = self._expect(PoolFrame.RESULT, function, deadline)
        try:
            return pickle.loads(packed)
        except Exception as error:
            raise CallFailed(function.name, type(error).__name__, f"its result cannot be read here: {error}") from error

    def take_back(self) -> int:
        """How many of the calls that were sent last did not begin, and now will not."""
        return self._tickets.take(_MAX_BATCH)

    def kill(self) -> None:
        """End the process and those it started, at once; harmless after its end."""
        self.usable = False
        with self._lock:
            # Once reaped, the number may belong to someone else.
            if not self._ended:
                _kill_group(self.pid)

    def end(self) -> int | None:
        """Kill it if it lives, release everything; its exit status as `subprocess` has it, None if it will not end."""
        self.kill()
        with self._lock:
            if not self._ended:
                self._channel.close()
                self._tickets.close()
            self._ended = True
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def alive(self) -> bool:
        """Whether the process runs. Looks without reaping, so that its number stays its own."""
        with self._lock:
            if self._ended:
                return False
            try:
                return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            except ChildProcessError:
                return False

    def _send_load(self, function: PackedFunction, deadline: float) -> None:
        forget = len(self._functions) >= _MAX_FUNCTIONS
        if forget:
            self._functions.clear()
        load = pickle.dumps((function.digest, search_path(), forget, function.payload))
        self._channel.send(PoolFrame.LOAD, load, deadline)

    def _finish_load(self, function: PackedFunction, deadline: float) -> None:
        self._expect(PoolFrame.LOADED, function, deadline)
        self._functions.add(function.digest)

    def _finish_warming(self, wanted: PackedFunction, deadline: float) -> None:
        warming, self._warming = self._warming, None
        if warming is None:
            return
        try:
            self._finish_load(warming, deadline)
        except LoadFailed:
            if warming.digest == wanted.digest:
                raise

    def _expect(self, wanted: PoolFrame, function: PackedFunction, deadline: float) -> bytes:
        kind, body = self._channel.receive(deadline)
        if kind is PoolFrame.UNLOADABLE:
            raise LoadFailed(function.name, *pickle.loads(body))
        if kind is PoolFrame.FAILED:
            raise CallFailed(function.name, *pickle.loads(body))
        if kind is not wanted:
            raise PoolChannelClosed(
                f"the worker answered {kind.name} instead of {wanted.name}, so nothing it says counts"
            )
        return body


def search_path() -> list[str]:
    """This process's import path, made independent of the working directory."""
    return [os.path.abspath(entry) for entry in sys.path]


def _start(channel_fd: int, tickets_fd: int, limits: Limits) -> "subprocess.Popen[bytes]":
    own = [str(channel_fd), str(tickets_fd), str(limits.memory_bytes or 0), str(limits.cpu_seconds or 0)]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOTSTRAP, *own, *search_path()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what functions print is for people; results have a channel of their own
        pass_fds=(channel_fd, tickets_fd),
        process_group=0,  # one signal reaches what a function started, and Ctrl-C reaches only us
        env={"OMP_NUM_THREADS": "1", **os.environ},  # there are as many processes as cores
    )


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # already gone and reaped by a process-wide SIGCHLD policy
    except PermissionError:
        os.kill(pid, signal.SIGKILL)
