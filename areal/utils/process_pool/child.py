"""One worker process as its parent sees it: start it, send it calls, read its answers, end it.

A fork server starts it and ends what it leaves behind. What the worker answers is data from code that is not ours: it
is checked and never unpickled.

Used only by the thread that made it, except for `kill`, which any thread may call.
"""

import math
import os
import pickle
import signal
import socket
import threading
import time
from collections import deque
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
    ResultRefused,
)
from areal.utils.process_pool.channel import (
    EXHAUSTED_STATUS,
    MAX_CLAIMS,
    MOST_RESULT_BYTES,
    RESULTS,
    TOKEN_BYTES,
    Claims,
    PoolChannel,
    PoolChannelBroken,
    PoolChannelClosed,
    PoolFrame,
)
from areal.utils.process_pool.fork_server import ForkedProcess, ForkServer, search_path

_MAX_FUNCTIONS = 64
_END_SECONDS = 10.0
_FAILURES: dict[PoolFrame, type[CallFailed]] = {
    PoolFrame.UNLOADABLE: LoadFailed,
    PoolFrame.FAILED: CallFailed,
    PoolFrame.REFUSED: ResultRefused,
}


@dataclass(frozen=True)
class Limits:
    memory_bytes: int | None = None
    """Private memory of each worker process; None = no limit."""
    cpu_seconds: float | None = None
    """CPU time of one call, rounded up to whole seconds; None = no limit."""


class Child:
    """Its methods raise PoolChannelClosed when the process has ended, PoolChannelBroken if it answers nonsense."""

    def __init__(self, server: ForkServer, limits: Limits, load_seconds: float) -> None:
        """`load_seconds` bounds the loading of a function, and of the arguments of one call."""
        self._server = server
        try:
            self._process, self._channel, self._claims = _forked(server, limits)
        except ConnectionError:  # the server has died meanwhile; another will do
            self._process, self._channel, self._claims = _forked(server, limits)
        self._load_seconds = load_seconds
        self._functions: set[bytes] = set()
        self._began: float | None = None
        """When the first unanswered call began; None = its STARTED has not come."""
        self._tokens: deque[bytes] = deque()
        """Of the calls that were sent and not answered, in their order, and last that of DONE."""
        self._lock = threading.Lock()
        self._ended = False
        self._status: int | None = None
        """How it ended, once it was ended."""
        self.usable = True
        """False once it was killed or died: end it and start another."""

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
            self._tokens = deque(_new_tokens(len(calls) + 1))
            work = [(token, call.arguments) for token, call in zip(self._tokens, calls, strict=False)]
            body = function.digest + self._tokens[-1] + pickle.dumps(work)
            self._channel.send(PoolFrame.CALLS, body, deadline)
        except LoadFailed:
            self.take_back()
            raise
        except TimeoutError:
            self.usable = False
            raise CallTimeout(f"{function.name} took over {self._load_seconds:g} s to load") from None

    def load(self, function: PackedFunction) -> None:
        """Load a function before it is called. Raises LoadFailed, or CallTimeout if loading hangs."""
        try:
            self._load(function, time.monotonic() + self._load_seconds)
        except TimeoutError:
            self.usable = False
            raise CallTimeout(f"{function.name} took over {self._load_seconds:g} s to load") from None

    def result(self, call: PoolCall, until: float = math.inf) -> Any:
        """What the first unanswered call returned; raises CallFailed if it raised, CallTimeout at its deadline.

        Raises TimeoutError if there is no answer at `until`, a `time.monotonic()` value; then ask again.
        """
        try:
            result = self._answer(call, until)
        except CallFailed:
            self._answered()
            raise
        self._answered()
        return result

    def finish(self, function: PackedFunction) -> None:
        """After the last answer: wait until it is ready for more, since it must not take the claims of other calls."""
        try:
            self._expect(PoolFrame.DONE, self._tokens[-1], function, time.monotonic() + self._load_seconds)
        except TimeoutError:
            self.usable = False
        if not self._channel.is_empty:
            raise PoolChannelBroken("more than its answers")

    def take_back(self, at_most: int = MAX_CLAIMS) -> int:
        """How many of the calls that were sent have not begun, and now will not: the last ones."""
        return self._claims.take(at_most)

    def kill(self) -> None:
        """End the process and those it started, at once; harmless after its end."""
        self.usable = False
        with self._lock:
            if not self._ended:
                self._process.kill()

    def end(self) -> int | None:
        """Kill it if it lives and release everything; returns its exit status as `subprocess` has it.

        None = it does not end even when killed.
        """
        self.kill()
        with self._lock:
            if self._ended:
                return self._status
            self._ended = True
        self._channel.close()
        self._claims.close()
        self._server.wake()  # it is the one who tells
        self._status = self._process.wait(_END_SECONDS)
        self._process.close()
        return self._status

    def crash(self, what: str, error: PoolChannelClosed) -> CallCrashed:
        """End it, and say how `what` ended it, which was noticed by `error`."""
        status = self.end()
        if isinstance(error, PoolChannelBroken):
            return CallCrashed(f"{what} wrote into the channel of its process, which was killed: the pool got {error}")
        if status == EXHAUSTED_STATUS:
            return CallExhausted(f"{what} needs more memory than its process may have", status)
        if status is None:
            return CallCrashed(f"{what} left process {self.pid}, which does not end when killed")
        # Real-time signals have no names.
        names = {known.value: known.name for known in signal.Signals}
        how = f"exit status {status}" if status >= 0 else f"killed by {names.get(-status, f'signal {-status}')}"
        if status == -signal.SIGKILL:
            how += ", unless it closed the channel of its process, which then was killed"
        return CallCrashed(f"{what} ended its process: {how}", status)

    def alive(self) -> bool:
        """Whether the process runs."""
        with self._lock:
            return not self._ended and self._process.alive()

    def _load(self, function: PackedFunction, deadline: float) -> None:
        if function.digest in self._functions:
            return
        forget = len(self._functions) >= _MAX_FUNCTIONS
        if forget:
            self._functions.clear()
        (token,) = _new_tokens(1)
        load = pickle.dumps((token, function.digest, search_path(), forget, function.payload))
        self._channel.send(PoolFrame.LOAD, load, deadline)
        self._expect(PoolFrame.LOADED, token, function, deadline)
        self._functions.add(function.digest)

    def _answer(self, call: PoolCall, until: float) -> Any:
        """The result. Both waits count from their own beginning: loading does not use up a call's time."""
        function, token = call.function, self._tokens[0]
        try:
            if self._began is None:
                load_ends = time.monotonic() + self._load_seconds
                self._expect(PoolFrame.STARTED, token, function, min(until, load_ends))
                self._began = time.monotonic()
            call_ends = self._began + call.timeout_seconds
            return _unpacked(self._expect(PoolFrame.RESULT, token, function, min(until, call_ends)))
        except TimeoutError:
            if until < math.inf:
                raise
            self.usable = False
            if self._began is None:
                text = f"the arguments of {function.name} took over {self._load_seconds:g} s to load"
            else:
                text = f"{function.name} was killed after {call.timeout_seconds:g} s"
            raise CallTimeout(text) from None

    def _answered(self) -> None:
        self._began = None
        self._tokens.popleft()

    def _expect(self, wanted: PoolFrame, token: bytes, function: PackedFunction, deadline: float) -> memoryview:
        """The body of the next frame, after its token. Raises CallFailed if a failure comes instead."""
        kind, body = self._channel.receive(deadline)
        if body[:TOKEN_BYTES] != token:
            raise PoolChannelBroken(f"a frame {kind.name} that answers nothing it waits for")
        rest = memoryview(body)[TOKEN_BYTES:]
        if kind in _FAILURES:
            raise _FAILURES[kind](function.name, *_failure_texts(rest))
        if kind is not wanted:
            raise PoolChannelBroken(f"a frame {kind.name} instead of {wanted.name}")
        return rest


def _forked(server: ForkServer, limits: Limits) -> tuple[ForkedProcess, PoolChannel, Claims]:
    """A new process and this end of what connects it."""
    ours, theirs = socket.socketpair()
    claims = Claims.new()
    with theirs:
        try:
            memory_bytes, cpu_seconds = limits.memory_bytes or 0, limits.cpu_seconds or 0.0
            process = server.fork(theirs.fileno(), claims.read_fd, memory_bytes, cpu_seconds)
        except OSError:
            ours.close()
            claims.close()
            raise
    return process, PoolChannel(ours, TOKEN_BYTES + MOST_RESULT_BYTES), claims


def _new_tokens(count: int) -> list[bytes]:
    drawn = os.urandom(TOKEN_BYTES * count)
    return [drawn[at : at + TOKEN_BYTES] for at in range(0, len(drawn), TOKEN_BYTES)]


def _unpacked(body: memoryview) -> Any:
    try:
        return RESULTS.unpack(body)
    except Exception as error:  # bytes that no worker packs can fail to unpack in many ways
        raise PoolChannelBroken(f"a body that cannot be read ({error})") from error


def _failure_texts(body: memoryview) -> tuple[str, str, str]:
    match _unpacked(body):
        case [str() as kind, str() as text, str() as trace]:
            return kind, text, trace
    raise PoolChannelBroken("a failure without its texts")
