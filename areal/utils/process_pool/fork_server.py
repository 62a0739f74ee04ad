"""Where a pool's worker processes come from: a small interpreter that forks one for each request, in milliseconds.

Starting an interpreter takes twenty times as long, and a pool under bad calls does little else. The server has one
thread and loads nothing of the user's, so that a fork of it is as good as a new process: environment, working
directory, umask and output are those of the pool's process at the moment of the request; limits, priority and
processors are those that it had when the server started. Both ends are here: `ForkServer` is the pool's, `serve` is
what the process runs.

The server also supervises: workers and server adopt orphans (`descendants`), so what a worker has started stays below
the worker while it lives and comes to the server when it ends, however that happens. The server then kills it and tells
the pool how the worker ended. It ends when the pool closes its connection or its process is gone, and all others do
before it.

Invariant: whatever is a child of the server and not one of its workers was left behind by a worker that has ended.
"""

import errno
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from areal.utils.process_pool.descendants import adopt_orphans, die_with_parent, end_descendants

# A command, not multiprocessing, so that scripts without a main guard work. The search path comes by argument and not
# by PYTHONPATH, which the user's own sub-processes would inherit.
_BOOTSTRAP = (
    "import sys; control, sys.path[:] = sys.argv[1], sys.argv[2:]; del sys.argv[1:]; "
    "from areal.utils.process_pool.fork_server import serve; serve(int(control))"
)
_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!i")
_SENT_FDS = 4
_START_SECONDS = 60.0
"""Until a worker process is there, that of the server included."""
_END_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerRequest:
    """What a new worker process is told, beside its channel, its claims, its working directory and where it prints."""

    memory_bytes: int
    """0 = no limit."""
    cpu_seconds: float
    environment: dict[bytes, bytes]
    umask: int | None
    """None = it is not known."""


class ForkedProcess:
    """What a fork server has started, by descriptors: once the server reaped it, its number may be another's."""

    def __init__(self, pid: int, pidfd: int, status_fd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status_fd = status_fd

    def kill(self) -> None:
        """Harmless after its end."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def alive(self) -> bool:
        return not _readable(self._pidfd, 0.0)

    def wait(self, seconds: float) -> int | None:
        """How it ended, as `subprocess` has it; None = it has not. With the server it ends too: as if by SIGKILL."""
        until = time.monotonic() + seconds
        if not _readable(self._status_fd, seconds):
            return None
        status = os.read(self._status_fd, _NUMBER.size)
        if status:
            return int(_NUMBER.unpack(status)[0])
        return -signal.SIGKILL if _readable(self._pidfd, until - time.monotonic()) else None

    def close(self) -> None:
        os.close(self._pidfd)
        os.close(self._status_fd)


class ForkServer:
    """The server's process starts with the first request, and again if it has died. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """None = there is no server now."""
        process = self._process
        return None if process is None else process.pid

    def fork(self, channel_fd: int, claims_fd: int, memory_bytes: int, cpu_seconds: float) -> ForkedProcess:
        """A new worker process at these descriptors; limits of 0 are none. Raises OSError.

        After a ConnectionError another try needs other descriptors: the server died, maybe after it had forked a
        process, and two that read one channel would each take a part of what is sent.
        """
        environment = {b"OMP_NUM_THREADS": b"1", **os.environb}  # there are as many processes as cores
        request = pickle.dumps(WorkerRequest(memory_bytes, cpu_seconds, environment, _umask()))
        directory_fd = os.open(".", os.O_PATH | os.O_DIRECTORY)  # by descriptor, as it may have been deleted
        fds = channel_fd, claims_fd, 2, directory_fd
        try:
            with self._lock:
                if self._closed:
                    raise OSError(errno.ESHUTDOWN, "the fork server was closed")
                if self._process is not None and self._process.poll() is None:
                    self.wake()
                else:
                    self._end()
                    self._start()
                return self._ask(request, fds)
        finally:
            os.close(directory_fd)

    def wake(self) -> None:
        """Let it go on if somebody has stopped it: its workers may signal it, and they run code that is not ours."""
        with self._lock:
            if self._process is not None:
                self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server, and with it every process that it started; harmless when repeated."""
        self._closed = True
        self.wake()
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is None:
            return
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno()), *search_path()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what functions print is for people; results have a channel of their own
                    pass_fds=(theirs.fileno(),),
                    process_group=0,  # Ctrl-C reaches only us
                )
            except OSError:
                ours.close()
                raise
        self._control = ours

    def _ask(self, request: bytes, fds: Sequence[int]) -> ForkedProcess:
        """Whatever goes wrong, question and answer no longer match, so the server ends."""
        assert self._control is not None
        try:
            self._control.settimeout(_START_SECONDS)
            socket.send_fds(self._control, [_LENGTH.pack(len(request))], fds)
            self._control.sendall(request)
            answer, received, _, _ = socket.recv_fds(self._control, _NUMBER.size, 2)
            if not answer:
                raise ConnectionResetError("the fork server of the process pool has ended")
            (pid,) = _NUMBER.unpack(answer)
        except BaseException:
            if self._process is not None:
                self._process.kill()
            self._end()
            raise
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        if len(received) < 2:  # there was no room for them here; the process ends when its channel is closed
            for descriptor in received:
                os.close(descriptor)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return ForkedProcess(pid, *received)


def serve(control_fd: int) -> None:
    """Fork a worker process for each request, and report the end of each, until the pool goes away."""
    # Loaded once here and not in every worker: these are what most of them come to need.
    import ctypes  # noqa: F401
    import importlib.metadata  # noqa: F401
    import traceback  # noqa: F401

    import cloudpickle  # noqa: F401

    import areal.utils.process_pool.worker  # noqa: F401

    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=control_fd))
    gc.collect()
    gc.freeze()  # what is never looked at again stays shared
    server.run()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._workers: dict[int, tuple[int, int]] = {}
        """By its descriptor: the number of each, and the pipe on which its end is reported."""
        self._parent = os.getppid()
        signal.signal(signal.SIGTERM, self._end_without_parent)
        die_with_parent(signal.SIGTERM)

    def run(self) -> NoReturn:
        while True:
            for ready, _ in self._poll.poll():
                if ready in self._workers:
                    self._report(ready)
                elif not self._answer():
                    self._end()

    def _end_without_parent(self, number: int, frame: FrameType | None) -> None:
        """The kernel tells of the end of the parent's thread that started this process, which may be all that ended."""
        if os.getppid() != self._parent:
            self._end()

    def _end(self) -> NoReturn:
        end_descendants()
        os._exit(0)

    def _answer(self) -> bool:
        """Serve one request; False = the pool is gone."""
        head, fds, _, _ = socket.recv_fds(self._control, _LENGTH.size, _SENT_FDS)
        if not head:
            return False
        try:
            self._fork(pickle.loads(self._read(*_LENGTH.unpack(head))), fds)
        except (EOFError, ConnectionError):
            return False
        except OSError as error:
            self._control.sendall(_NUMBER.pack(-(error.errno or errno.EIO)))
        finally:
            for descriptor in fds:
                os.close(descriptor)
        return True

    def _read(self, length: int) -> bytes:
        body = bytearray()
        while len(body) < length:
            piece = self._control.recv(length - len(body))
            if not piece:
                raise EOFError
            body += piece
        return bytes(body)

    def _fork(self, request: WorkerRequest, fds: Sequence[int]) -> None:
        status_read, status_write = os.pipe()
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(status_read)
            os.close(status_write)
            raise
        if not pid:
            own = (self._control.fileno(), status_read, status_write)
            for descriptor in (*own, *self._workers, *(status_fd for _, status_fd in self._workers.values())):
                os.close(descriptor)
            _become_worker(request, fds, server_pid)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(status_read)
            os.close(status_write)
            raise
        self._workers[pidfd] = pid, status_write
        self._poll.register(pidfd, select.POLLIN)
        socket.send_fds(self._control, [_NUMBER.pack(pid)], [pidfd, status_read])
        os.close(status_read)

    def _report(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        pid, status_fd = self._workers.pop(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        end_descendants({worker for worker, _ in self._workers.values()})
        with suppress(BrokenPipeError):  # the pool does not want to know
            os.write(status_fd, _NUMBER.pack(status))
        os.close(status_fd)
        os.close(pidfd)


def _become_worker(request: WorkerRequest, fds: Sequence[int], server_pid: int) -> NoReturn:
    """In the fork: be as a process that the pool's own had started."""
    from areal.utils.process_pool.worker import main

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)  # a function that signals its own group reaches no one else
        channel_fd, claims_fd, output_fd, directory_fd = fds
        for printed in (1, 2):
            os.dup2(output_fd, printed)
        os.fchdir(directory_fd)
        os.close(output_fd)
        os.close(directory_fd)
        if request.environment != {**os.environb}:
            os.environ.clear()
            os.environb.update(request.environment)
            time.tzset()
        if request.umask is not None:
            os.umask(request.umask)
        main(channel_fd, claims_fd, request.memory_bytes, request.cpu_seconds, server_pid)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def search_path() -> list[str]:
    """This process's import path, made independent of the working directory, which may be deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return [entry for entry in sys.path if os.path.isabs(entry)]
    return [os.path.abspath(entry) for entry in sys.path]


def _umask() -> int | None:
    """Read, because `os.umask` tells it only by changing it, for all threads."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        found = [line.partition(":")[2] for line in lines if line.startswith("Umask:")]
    return int(found[0], 8) if found else None


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1e3))
