"""One worker process seen from its parent: start it, give it functions, run a call in it, end it.

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
import time
from dataclasses import dataclass
from typing import Any

from areal.utils.process_call import PackedFunction
from areal.utils.process_channel import Channel, ChannelClosed, Kind
from areal.utils.process_errors import CallCrashed, CallFailed, CallTimeout

# A command, not multiprocessing, so that scripts without a main guard work. The search path comes by argument and not
# by PYTHONPATH, which the user's own sub-processes would inherit.
_BOOTSTRAP = (
    "import sys; own, sys.path[:] = sys.argv[1:4], sys.argv[4:]; del sys.argv[1:]; "
    "from areal.utils.process_worker import main; main(int(own[0]), int(own[1]), float(own[2]))"
)
_MAX_FUNCTIONS = 64
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    memory_bytes: int | None = None
    """Private memory of each worker process; None = no limit."""
    cpu_seconds: float | None = None
    """CPU time of one call, rounded up to whole seconds; None = no limit."""


class NotStarted(Exception):
    """The process ended before the call began, so the call may be given to another."""


class Child:
    def __init__(self, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._functions: set[bytes] = set()
        self._lock = threading.Lock()
        self._ended = False
        self.usable = True
        """False once it was killed, died, or ran out of memory: end it and start another."""
        with theirs:
            try:
                self._process = _start(theirs.fileno(), limits)
            except OSError:
                ours.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, function: PackedFunction, body: bytes, timeout_seconds: float, load_seconds: float) -> Any:
        """The result of one call. Loading its function and arguments has its own limit; the deadline is for running."""
        try:
            return self._run(function, body, timeout_seconds, load_seconds)
        except CallFailed:
            raise
        except BaseException:
            self.usable = False
            raise

    def kill(self) -> None:
        """End the process and those it started, at once; harmless after its end."""
        self.usable = False
        with self._lock:
            # Once reaped, the number may belong to someone else.
            if not self._ended:
                _kill_group(self.pid)

    def end(self) -> str:
        """Kill it if it lives, release everything, and say how it ended."""
        self.kill()
        with self._lock:
            self._ended = True
        self._channel.close()
        try:
            return _exit_text(self._process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            return f"process {self.pid} did not end within {_END_SECONDS:g} s of SIGKILL"

    def alive(self) -> bool:
        """Whether the process runs. Looks without reaping, so that its number stays its own."""
        with self._lock:
            if self._ended:
                return False
            try:
                return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            except ChildProcessError:
                return False

    def _run(self, function: PackedFunction, body: bytes, timeout_seconds: float, load_seconds: float) -> Any:
        try:
            self._begin(function, body, time.monotonic() + load_seconds)
        except ChannelClosed as error:
            raise NotStarted from error
        except TimeoutError:
            raise CallTimeout(f"{function.name} and its arguments took over {load_seconds:g} s to load") from None
        try:
            return self._finish(function, time.monotonic() + timeout_seconds)
        except ChannelClosed:
            raise CallCrashed(f"{function.name} ended its process: {self.end()}") from None
        except TimeoutError:
            raise CallTimeout(f"{function.name} was killed after {timeout_seconds:g} s") from None

    def _begin(self, function: PackedFunction, body: bytes, deadline: float) -> None:
        if function.digest not in self._functions:
            forget = len(self._functions) >= _MAX_FUNCTIONS
            load = pickle.dumps((function.digest, search_path(), forget, function.payload))
            self._channel.send(Kind.LOAD, load, deadline)
            self._expect(Kind.LOADED, function, deadline)
            if forget:
                self._functions.clear()
            self._functions.add(function.digest)
        self._channel.send(Kind.CALL, function.digest + body, deadline)
        self._expect(Kind.STARTED, function, deadline)

    def _finish(self, function: PackedFunction, deadline: float) -> Any:
        result = self._expect(Kind.RESULT, function, deadline)
        try:
            return pickle.loads(result)
        except Exception as error:
            raise CallFailed(function.name, type(error).__name__, f"its result cannot be read here: {error}") from error

    def _expect(self, wanted: Kind, function: PackedFunction, deadline: float) -> bytes:
        kind, body = self._channel.receive(deadline)
        if kind is Kind.EXHAUSTED:
            self.usable = False
            raise CallFailed(function.name, "MemoryError", "it needs more memory than its process may have")
        if kind is Kind.FAILED:
            raise CallFailed(function.name, *pickle.loads(body))
        assert kind is wanted, f"worker answered {kind.name}, expected {wanted.name}"
        return body


def search_path() -> list[str]:
    """This process's import path, made independent of the working directory."""
    return [os.path.abspath(entry) for entry in sys.path]


def _start(channel_fd: int, limits: Limits) -> "subprocess.Popen[bytes]":
    own = [str(channel_fd), str(limits.memory_bytes or 0), str(limits.cpu_seconds or 0)]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOTSTRAP, *own, *search_path()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what functions print is for people; results have a channel of their own
        pass_fds=(channel_fd,),
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


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    return f"killed by {signal.Signals(-code).name}"
