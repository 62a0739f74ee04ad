"""What runs inside a worker process of `ProcessPool`: keep functions, call one at a time, answer in frames.

It applies the process's limits and ends with the parent. It does not enforce deadlines: the parent kills it. Nothing
heavy is imported here, so that a killed worker is replaced in a tenth of a second.
"""

import ctypes
import importlib
import math
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from areal.utils.process_pool.channel import (
    DIGEST_BYTES,
    EXHAUSTED_STATUS,
    Claims,
    PoolChannel,
    PoolChannelClosed,
    PoolFrame,
)

_PR_SET_PDEATHSIG = 1

Reply = tuple[PoolFrame, bytes]


def main(channel_fd: int, claims_fd: int, memory_bytes: int, cpu_seconds: float) -> None:
    """Serve the parent at `channel_fd` until it goes away; a limit of 0 is none."""
    _die_with_parent()
    _die_before_others()
    for descriptor in (channel_fd, claims_fd):
        os.set_inheritable(descriptor, False)
        # A fork that a function made must neither answer in our place nor keep the channel open after our end.
        os.register_at_fork(after_in_child=lambda descriptor=descriptor: os.close(descriptor))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # prints survive a kill
    _limit(resource.RLIMIT_CORE, 0)
    if memory_bytes:
        # Not RLIMIT_AS, which counts mapped libraries and reservations too: importing a GPU framework would exceed it.
        _limit(resource.RLIMIT_DATA, memory_bytes)
    worker = PoolWorker(PoolChannel(socket.socket(fileno=channel_fd)), Claims(claims_fd), cpu_seconds)
    try:
        worker.serve()
    except MemoryError:
        os._exit(EXHAUSTED_STATUS)
    # Not a return: interpreter exit would wait for threads that the user's functions left running.
    os._exit(0)


class PoolWorker:
    """A MemoryError ends it, because no one can tell what else in the process went without memory."""

    def __init__(self, channel: PoolChannel, claims: Claims, cpu_seconds: float) -> None:
        self._channel = channel
        self._claims = claims
        self._cpu_seconds = cpu_seconds
        self._functions: dict[bytes, Callable[..., Any]] = {}

    def serve(self) -> None:
        with suppress(PoolChannelClosed):
            while True:
                kind, body = self._channel.receive()
                if kind is PoolFrame.LOAD:
                    self._channel.send(*self._load(body))
                else:
                    self._run(body)

    def _load(self, body: bytes) -> Reply:
        digest, search_path, forget, payload = pickle.loads(body)
        sys.path[:] = search_path
        importlib.invalidate_caches()
        if forget:
            self._functions.clear()
        try:
            self._functions[digest] = pickle.loads(payload)
        except MemoryError:
            raise
        except BaseException as error:
            return PoolFrame.UNLOADABLE, _describe(error)
        return PoolFrame.LOADED, b""

    def _run(self, body: bytes) -> None:
        function = self._functions[body[:DIGEST_BYTES]]
        for arguments in pickle.loads(memoryview(body)[DIGEST_BYTES:]):
            if not self._claims.take(1):
                break
            self._channel.send(*self._call(function, arguments))
        self._channel.send(PoolFrame.DONE)

    def _call(self, function: Callable[..., Any], arguments: bytes) -> Reply:
        try:
            args, kwargs = pickle.loads(arguments)
        except MemoryError:
            raise
        except BaseException as error:
            return PoolFrame.UNLOADABLE, _describe(error)
        self._channel.send(PoolFrame.STARTED)
        try:
            with _cpu_limit(self._cpu_seconds):
                return PoolFrame.RESULT, _pack_result(function(*args, **kwargs))
        except MemoryError:
            raise
        except BaseException as error:  # sys.exit() in a function is its own failure, not this process's end
            return PoolFrame.FAILED, _describe(error)


def _pack_result(result: Any) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Objects of classes that came by value. Rare, so only such a worker pays for the import.
        import cloudpickle

        packed: bytes = cloudpickle.dumps(result)
        return packed


def _describe(error: BaseException) -> bytes:
    import traceback  # here, because most workers never need it

    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises must still be reported
        text = f"<its message cannot be made: {type(broken).__name__}>"
    return pickle.dumps((type(error).__qualname__, text, "".join(traceback.format_exception(error))))


def _die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent, even in the middle of a call that never ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_before_others() -> None:
    """Where memory escapes our limit (shared memory, many sub-processes), let a full machine kill this first."""
    # Not Linux, or not permitted: the limit is there all the same.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process after `seconds` more of CPU time, in whole seconds rounded up; 0 = no limit."""
    if not seconds:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_CPU)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)
