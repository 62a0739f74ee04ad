"""What runs inside a worker process of `ProcessPool`: keep functions, call one at a time, answer in frames.

It applies the process's limits and ends with the parent. It does not enforce deadlines: the parent kills it. Nothing
heavy is imported here, because the fork server of every pool loads it.

Between two calls, what the first changed in the process is undone and what it started is killed, before its answer is
sent: if that fails, its own call fails. What loading a function changed or started stays for all of its calls.

All of this shares an interpreter with the functions. It holds against carelessness, not against a function that means
to harm the pool: such a one can change this module.
"""

import importlib
import math
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pickle import loads  # by name, because a function may replace what it finds in a module
from typing import Any

from areal.utils.process_pool.channel import (
    DIGEST_BYTES,
    EXHAUSTED_STATUS,
    MOST_RESULT_BYTES,
    RESULTS,
    TOKEN_BYTES,
    Claims,
    PoolChannel,
    PoolChannelClosed,
    PoolFrame,
)
from areal.utils.process_pool.descendants import (
    SHARED_BY_CALLS,
    adopt_orphans,
    children_of,
    die_with_parent,
    end_descendants,
    has_children,
)
from areal.utils.process_pool.process_state import ProcessState

_MOST_TEXT_CHARACTERS = 10_000
_MOST_TRACE_CHARACTERS = 50_000
_POOL_MODULE = "areal.utils.process_pool.pool"

Reply = tuple[PoolFrame, bytes]


def main(channel_fd: int, claims_fd: int, memory_bytes: int, cpu_seconds: float, supervisor: int) -> None:
    """Serve the pool at `channel_fd` until it or the parent, `supervisor`, goes away; a limit of 0 is none."""
    die_with_parent()
    adopt_orphans()
    _limit(resource.RLIMIT_CORE, 0)
    _die_before_others()
    for descriptor in (channel_fd, claims_fd):
        os.set_inheritable(descriptor, False)
        # A fork that a function made must neither answer in our place nor keep the channel open after our end.
        os.register_at_fork(after_in_child=lambda descriptor=descriptor: os.close(descriptor))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # prints survive a kill
    if memory_bytes:
        # Not RLIMIT_AS, which counts mapped libraries and reservations too: importing a GPU framework would exceed it.
        _limit(resource.RLIMIT_DATA, memory_bytes)
    worker = PoolWorker(PoolChannel(socket.socket(fileno=channel_fd)), Claims(claims_fd), cpu_seconds)
    if os.getppid() != supervisor:
        os._exit(1)  # it ended before the kernel was asked to tell
    try:
        worker.serve()
    except MemoryError:
        os._exit(EXHAUSTED_STATUS)
    except OSError as error:
        print(f"a function closed the channel of its worker process: {error}", file=sys.stderr)
        os._exit(1)
    # Not a return: interpreter exit would wait for threads that the user's functions left running.
    os._exit(0)


class PoolWorker:
    """A MemoryError ends it, because no one can tell what else in the process went without memory."""

    def __init__(self, channel: PoolChannel, claims: Claims, cpu_seconds: float) -> None:
        self._channel = channel
        self._claims = claims
        self._cpu_seconds = cpu_seconds
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._state = ProcessState()
        self._kept: set[int] = set()
        """Children that were started before the call, and stay."""
        self._spoiled = False
        """A call has changed what cannot be put back: another process must run the next one."""

    def serve(self) -> None:
        with suppress(PoolChannelClosed):
            while not self._spoiled:
                kind, body = self._channel.receive()
                if kind is PoolFrame.LOAD:
                    self._load(body)
                else:
                    self._run(body)

    def _load(self, body: bytes) -> None:
        token, digest, search_path, forget, payload = loads(body)
        sys.path[:] = search_path
        importlib.invalidate_caches()
        if forget:
            self._functions.clear()
        try:
            self._functions[digest] = loads(payload)
            reply = PoolFrame.LOADED, b""
        except MemoryError:
            raise
        except BaseException as error:
            reply = PoolFrame.UNLOADABLE, _describe(error)
        self._state.record()
        self._kept = _children()
        self._send(token, reply)

    def _run(self, body: bytes) -> None:
        function, rest = self._functions[body[:DIGEST_BYTES]], memoryview(body)[DIGEST_BYTES:]
        done_token = bytes(rest[:TOKEN_BYTES])
        for token, arguments in loads(rest[TOKEN_BYTES:]):
            if self._spoiled or not self._claims.take(1):
                break
            self._send(token, self._call(token, function, arguments))
        self._restore(self._state.restore_all)
        self._send(done_token, (PoolFrame.DONE, b""))

    def _call(self, token: bytes, function: Callable[..., Any], arguments: bytes) -> Reply:
        try:
            args, kwargs = loads(arguments)
        except MemoryError:
            raise
        except BaseException as error:
            return PoolFrame.UNLOADABLE, _describe(error)
        self._state.record_imports()
        self._send(token, (PoolFrame.STARTED, b""))
        try:
            with _cpu_limit(self._cpu_seconds):
                result = function(*args, **kwargs)
            self._clean_up(self._state.restore)
            return _pack_result(result)
        except MemoryError:
            raise
        except BaseException as error:  # sys.exit() in a function is its own failure, not this process's end
            self._clean_up(self._state.restore_all)
            return PoolFrame.FAILED, _describe(error)

    def _restore(self, restore: Callable[[], None]) -> None:
        try:
            restore()
        except Exception:  # whatever the reason, the next call must not begin in this state
            self._spoiled = True

    def _clean_up(self, restore: Callable[[], None]) -> None:
        self._restore(restore)
        if has_children():
            self._spoiled |= not end_descendants(self._kept | SHARED_BY_CALLS | _pool_processes())
            self._kept = _children()

    def _send(self, token: bytes, reply: Reply) -> None:
        kind, body = reply
        self._channel.send(kind, token + body)


def _children() -> set[int]:
    return set(children_of(os.getpid())) if has_children() else set()


def _pool_processes() -> set[int]:
    """The processes of reward functions that an agent calls here, which are shared by its episodes."""
    pool = sys.modules.get(_POOL_MODULE)
    return set(pool.SHARED.supervisors()) if pool is not None else set()


def _pack_result(result: Any) -> Reply:
    try:
        packed = RESULTS.pack(result)
    except (TypeError, ValueError, RuntimeError) as error:
        return PoolFrame.REFUSED, RESULTS.pack((type(error).__qualname__, str(error)[:_MOST_TEXT_CHARACTERS], ""))
    if len(packed) <= MOST_RESULT_BYTES:
        return PoolFrame.RESULT, packed
    text = f"a result may take {MOST_RESULT_BYTES} bytes, got {len(packed)}; write it to a file and return its name"
    return PoolFrame.REFUSED, RESULTS.pack(("ValueError", text, ""))


def _describe(error: BaseException) -> bytes:
    import traceback  # here, because most workers never need it

    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises must still be reported
        text = f"<its message cannot be made: {type(broken).__name__}>"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # so must one without a traceback that can be written
        trace = ""
    # Of a traceback the end says most.
    return RESULTS.pack((type(error).__qualname__, text[:_MOST_TEXT_CHARACTERS], trace[-_MOST_TRACE_CHARACTERS:]))


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
