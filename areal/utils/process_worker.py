"""What runs inside a worker process of `ProcessPool`: keep functions, call one at a time, answer in frames.

It owns the process's limits and its end with the parent's. It refuses to decide about deadlines: the parent kills it.
Nothing heavy is imported here, so that a killed worker is replaced in a tenth of a second.
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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from areal.utils.process_channel import DIGEST_BYTES, Channel, ChannelClosed, Kind

_PR_SET_PDEATHSIG = 1

Reply = tuple[Kind, bytes]


def main(channel_fd: int, memory_bytes: int, cpu_seconds: float) -> None:
    """Serve the parent at `channel_fd` until it goes away; a limit of 0 is none."""
    _die_with_parent()
    os.set_inheritable(channel_fd, False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # prints survive a kill
    _limit(resource.RLIMIT_CORE, 0)
    if memory_bytes:
        # Not RLIMIT_AS, which counts mapped libraries and reservations too: importing a GPU framework would exceed it.
        _limit(resource.RLIMIT_DATA, memory_bytes)
    Worker(Channel(socket.socket(fileno=channel_fd)), cpu_seconds).serve()
    # Not a return: interpreter exit would wait for threads that the user's functions left behind.
    os._exit(0)


class Worker:
    def __init__(self, channel: Channel, cpu_seconds: float) -> None:
        self._channel = channel
        self._cpu_seconds = cpu_seconds
        self._functions: dict[bytes, Callable[..., Any]] = {}

    def serve(self) -> None:
        try:
            while True:
                self._channel.send(*self._answer(*self._channel.receive()))
        except ChannelClosed:
            return

    def _answer(self, kind: Kind, body: bytes) -> Reply:
        try:
            return self._load(body) if kind is Kind.LOAD else self._call(body)
        except MemoryError:
            return Kind.EXHAUSTED, b""
        except ChannelClosed:
            raise
        except BaseException as error:  # sys.exit() in a function is its own failure, not this process's end
            return Kind.FAILED, _describe(error)

    def _load(self, body: bytes) -> Reply:
        digest, search_path, forget, payload = pickle.loads(body)
        sys.path[:] = search_path
        importlib.invalidate_caches()
        if forget:
            self._functions.clear()
        self._functions[digest] = pickle.loads(payload)
        return Kind.LOADED, b""

    def _call(self, body: bytes) -> Reply:
        function = self._functions[body[:DIGEST_BYTES]]
        args, kwargs = pickle.loads(memoryview(body)[DIGEST_BYTES:])
        self._channel.send(Kind.STARTED)
        with _cpu_limit(self._cpu_seconds):
            result = function(*args, **kwargs)
        return Kind.RESULT, _pack(result)


def _pack(result: Any) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Objects of classes that came by value. Rare, so only such a worker pays for the import.
        import cloudpickle

        packed: bytes = cloudpickle.dumps(result)
        return packed


def _describe(error: BaseException) -> bytes:
    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises must still be reported
        text = f"<its message cannot be made: {type(broken).__name__}>"
    return pickle.dumps((type(error).__qualname__, text, "".join(traceback.format_exception(error))))


def _die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent, even in the middle of a call that never ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
