"""One worker process as its parent sees it: start it, send it calls, read its answers, end it.

Used only by the thread that made it, except for `kill`, which any thread may call. That thread must outlive it: Linux
sends a worker its parent-death signal when the *thread* that started it ends.
"""

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.utils.process_pool.calls import (
    CallCrashed,
    CallExhausted,
    CallFailed,
    CallTimeout,
    LoadFailed,
    PackedFunction,
    PoolCall,
)
from areal.utils.process_pool.channel import (
    EXHAUSTED_STATUS,
    MAX_CLAIMS,
    Claims,
    PoolChannel,
    PoolChannelClosed,
    PoolFrame,
)

# A command, not multiprocessing, so that scripts without a main guard work. The search path comes by argument and not
# by PYTHONPATH, which the user's own sub-processes would inherit.
_BOOTSTRAP = (
    "import sys; own, sys.path[:] = sys.argv[1:5], sys.argv[5:]; del sys.argv[1:]; "
    "from areal.utils.process_pool.worker import main; main(*map(int, own[:3]), float(own[3]))"
)
_MAX_FUNCTIONS = 64
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    memory_bytes: int | None = None
    """Private memory of each worker process; None = no limit."""
    cpu_seconds: float | None = None
    """CPU time of one call, rounded up to whole seconds; None = no limit."""


class Child:
    """Its methods raise PoolChannelClosed when the process has ended, or answers what makes no sense."""

    def __init__(self, limits: Limits, load_seconds: float) -> None:
        """`load_seconds` bounds the loading of a function, and of the arguments of one call."""
        ours, theirs = socket.socketpair()
        self._channel = PoolChannel(ours)
        self._claims = Claims.new()
        self._load_seconds = load_seconds
        self._functions: set[bytes] = set()
        self._began: float | None = None
        """When the first unanswered call began; None = its STARTED has not come."""
        self._lock = threading.Lock()
        self._ended = False
        self.usable = True
        """False once it was killed or died: end it and start another."""
        with theirs:
            try:
                self._process = _start(theirs.fileno(), self._claims.read_fd, limits)
            except OSError:
                ours.close()
                self._claims.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, calls: Sequence[PoolCall]) -> None:
        """Send calls of one function, to be run in this order. Raises LoadFailed, or CallTimeout if loading hangs."""
        function = calls[0].function
        deadline = time.monotonic() + self._load_seconds
        self._claims.put(len(calls))
        try:
            self._load(function, deadline)
            arguments = pickle.dumps([call.arguments for call in calls])
            self._channel.send(PoolFrame.CALLS, function.digest + arguments, deadline)
        except LoadFailed:
            self.take_back()
            raise
        except TimeoutError:
            self.usable = False
            raise CallTimeout(f"{function.name} took over {self._load_seconds:g} s to load") from None

    def result(self, call: PoolCall, until: float = math.inf) -> Any:
        """What the first unanswered call returned; raises CallFailed if it raised, CallTimeout at its deadline.

        Raises TimeoutError if there is no answer at `until`, a `time.monotonic()` value; then ask again.
        """
        try:
            answer = self._answer(call, until)
        except CallFailed:
            self._began = None
            raise
        self._began = None
        try:
            return pickle.loads(answer)
        except Exception as error:
            text = f"its result cannot be read here: {error}"
            raise CallFailed(call.function.name, type(error).__name__, text) from error

    def finish(self, function: PackedFunction) -> None:
        """After the last answer: wait until it is ready for more, since it must not take the claims of other calls."""
        try:
            self._expect(PoolFrame.DONE, function, time.monotonic() + self._load_seconds)
        except TimeoutError:
            self.usable = False

    def take_back(self, at_most: int = MAX_CLAIMS) -> int:
        """How many of the calls that were sent have not begun, and now will not: the last ones."""
        return self._claims.take(at_most)

    def kill(self) -> None:
        """End the process and those it started, at once; harmless after its end."""
        self.usable = False
        with self._lock:
            # Once reaped, the number may belong to another process.
            if not self._ended:
                _kill_group(self.pid)

    def end(self) -> int | None:
        """Kill it if it lives and release everything; returns its exit status as `subprocess` has it.

        None = it does not end even when killed.
        """
        self.kill()
        with self._lock:
            if not self._ended:
                self._channel.close()
                self._claims.close()
            self._ended = True
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def crash(self, what: str) -> CallCrashed:
        """End it, and say how `what` ended it."""
        status = self.end()
        if status == EXHAUSTED_STATUS:
            return CallExhausted(f"{what} needs more memory than its process may have")
        if status is None:
            return CallCrashed(f"{what} left process {self.pid}, which does not end when killed")
        # Real-time signals have no names.
        names = {known.value: known.name for known in signal.Signals}
        how = f"exit status {status}" if status >= 0 else f"killed by {names.get(-status, f'signal {-status}')}"
        return CallCrashed(f"{what} ended its process: {how}")

    def alive(self) -> bool:
        """Whether the process runs. Looks without reaping, so that its number stays its own."""
        with self._lock:
            if self._ended:
                return False
            try:
                return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            except ChildProcessError:
                return False

    def _load(self, function: PackedFunction, deadline: float) -> None:
        if function.digest in self._functions:
            return
        forget = len(self._functions) >= _MAX_FUNCTIONS
        if forget:
            self._functions.clear()
        load = pickle.dumps((function.digest, _search_path(), forget, function.payload))
        self._channel.send(PoolFrame.LOAD, load, deadline)
        self._expect(PoolFrame.LOADED, function, deadline)
        self._functions.add(function.digest)

    def _answer(self, call: PoolCall, until: float) -> bytes:
        """The packed result. Both waits count from their own beginning: loading does not use up a call's time."""
        function = call.function
        try:
            if self._began is None:
                self._expect(PoolFrame.STARTED, function, min(until, time.monotonic() + self._load_seconds))
                self._began = time.monotonic()
            return self._expect(PoolFrame.RESULT, function, min(until, self._began + call.timeout_seconds))
        except TimeoutError:
            if until < math.inf:
                raise
            self.usable = False
            if self._began is None:
                text = f"the arguments of {function.name} took over {self._load_seconds:g} s to load"
            else:
                text = f"{function.name} was killed after {call.timeout_seconds:g} s"
            raise CallTimeout(text) from None

    def _expect(self, wanted: PoolFrame, function: PackedFunction, deadline: float) -> bytes:
        kind, body = self._channel.receive(deadline)
        if kind is PoolFrame.UNLOADABLE:
            raise LoadFailed(function.name, *pickle.loads(body))
        if kind is PoolFrame.FAILED:
            raise CallFailed(function.name, *pickle.loads(body))
        if kind is not wanted:
            raise PoolChannelClosed(f"the worker sent {kind.name} where {wanted.name} was expected")
        return body


def _search_path() -> list[str]:
    """This process's import path, made independent of the working directory."""
    return [os.path.abspath(entry) for entry in sys.path]


def _start(channel_fd: int, claims_fd: int, limits: Limits) -> "subprocess.Popen[bytes]":
    own = [str(channel_fd), str(claims_fd), str(limits.memory_bytes or 0), str(limits.cpu_seconds or 0)]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOTSTRAP, *own, *_search_path()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what functions print is for people; results have a channel of their own
        pass_fds=(channel_fd, claims_fd),
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
