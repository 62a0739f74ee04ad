"""Run an untrusted program, one that a model wrote.

`run_program` starts Python without environment variables, as a user without rights, with limits on time, memory, disk,
output, files and processes, and in the end kills it and everything it started. The kernel keeps it from the network,
from other files and from other processes, by the first of these that works on this machine:

- `namespaces`: nothing outside exists for it. Linux 5.14 or newer, as root, or where users may make user namespaces.
- `bubblewrap`: the same made by the program `bwrap`, which some distributions permit where they forbid it to others.
- `landlock`: outside exists and the kernel refuses it. Linux 5.13 or newer, most containers included.

Where none works, `run_program` refuses, unless `isolation="none"` is asked for by name. A process that runs programs
has one launcher (`launcher/`), which prepares the isolation once.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from areal.config.errors import ConfigError, require
from areal.utils.process_pool.descendants import SHARED_BY_CALLS

Isolation = Literal["namespaces", "bubblewrap", "landlock", "none"]
AskedIsolation = Isolation | Literal["auto"]

ORDER: tuple[Isolation, ...] = ("namespaces", "bubblewrap", "landlock")
"""The strongest and most capable first."""
_ANSWER_SECONDS = 60.0
"""For what the launcher has to do besides running a program, on a machine that is busy."""

_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from launcher.processes import main; main()"
_PROBE = """
import os, socket
def refused(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
attempts = [(socket.socket,), (open, "/etc/passwd"), (open, "/proc/1/cmdline"), (open, "/tmp/areal-probe", "w")]
print(os.getuid() != 0 and all(refused(*each) for each in attempts))
"""


@dataclass(frozen=True)
class SandboxLimits:
    timeout_seconds: float = 10.0
    """From start to end; then everything is killed."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    disk_bytes: int = 64 << 20
    """Of all its files together, in `namespaces`; `bubblewrap` and `landlock` let it write none."""
    output_bytes: int = 1 << 20
    """Of standard output, of standard error, and of any file."""
    processes: int = 16
    """Processes and threads at one time. `bubblewrap` and `landlock` allow one process with its threads."""
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, f"{name} must be > 0, got {value}")


@dataclass(frozen=True)
class ProgramRun:
    status: int | None
    """Exit status, 0 is success; None = it was killed at the deadline."""
    output: str
    errors: str
    isolation: Isolation


class ProgramStop:
    """Ends a program, and everything it started, before its deadline; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_asked = False
        self._report: socket.socket | None = None

    def stop(self) -> None:
        with self._lock:
            self._is_asked = True
            self._hang_up()

    def follow(self, report: socket.socket) -> None:
        """The program whose end is reported there: its launcher ends it when nobody listens any more."""
        with self._lock:
            self._report = report
            if self._is_asked:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._report is not None:
            with suppress(OSError):  # it has ended
                self._report.shutdown(socket.SHUT_RDWR)


def run_program(
    text: str,
    stdin: str = "",
    limits: SandboxLimits = SandboxLimits(),
    *,
    isolation: AskedIsolation = "auto",
    stop: ProgramStop | None = None,
) -> ProgramRun:
    """Run a Python program until it ends or reaches its deadline. Raises `ConfigError` where it cannot be isolated.

    Raises RuntimeError if the sandbox fails, or if `stop` ended the program.
    """
    return _LAUNCHERS.run(find_isolation(isolation), text, stdin, limits, stop)


def find_isolation(
    asked: AskedIsolation = "auto", why_not: "Callable[[Isolation], str | None] | None" = None
) -> Isolation:
    """The kind of isolation that programs get; raises `ConfigError` with the remedy if there is none.

    `why_not` says why a kind does not work here, None if it does; by default each kind is tried out, once per process.
    """
    choices = ("auto", *get_args(Isolation))
    require(asked in choices, f"isolation must be one of {', '.join(choices)}, got {asked!r}")
    require(sys.platform == "linux", f"programs run in a sandbox on Linux only, this is {sys.platform}")
    if asked == "none":
        return "none"
    reasons = {}
    for kind in ORDER if asked == "auto" else (asked,):
        reasons[kind] = (why_not or _LAUNCHERS.why_not)(kind)
        if reasons[kind] is None:
            return kind
    _LAUNCHERS.forget_reasons()
    raise ConfigError(
        f"programs of a model run only where the kernel isolates them; isolation={asked!r} does not work here ("
        + "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
        + "). Allow user namespaces (in a container: --security-opt seccomp=unconfined or --cap-add SYS_ADMIN; on "
        "Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0), install bubblewrap, or use a kernel with "
        "Landlock. "
        'isolation="none" runs them without any protection'
    )


class _Launcher:
    """The process that starts programs under one kind of isolation."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(_ANSWER_SECONDS)
        setup = {"isolation": isolation, "caller": os.getpid()}
        with theirs:
            self.process = subprocess.Popen(
                [_python(), "-I", "-S", "-c", _START, str(Path(__file__).parent), json.dumps(setup)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={},
                start_new_session=True,
            )
        SHARED_BY_CALLS.add(self.process.pid)
        try:
            answer = self.control.recv(4096)
        except TimeoutError:
            self.process.kill()
            answer = b""
        self.refusal: str | None = json.loads(answer or '{"refused": "the launcher failed"}').get("refused")

    def run(self, text: str, stdin: str, limits: SandboxLimits, stop: ProgramStop | None = None) -> ProgramRun:
        """Raises `BrokenPipeError` or `ConnectionResetError` if the launcher has ended."""
        if self.refusal is not None:
            raise RuntimeError(f"the sandbox could not start: {self.refusal}")
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.settimeout(limits.timeout_seconds + _ANSWER_SECONDS)
        files = [_memory_file(data) for data in (text, stdin, "", "")]
        try:
            with report:
                with theirs:
                    job = json.dumps(asdict(limits)).encode()
                    socket.send_fds(self.control, [job], [theirs.fileno(), *files])
                if stop is not None:
                    stop.follow(report)
                outcome: dict[str, Any] = json.loads(report.recv(1 << 16) or b"{}")
            output, errors = (_text(file, limits.output_bytes) for file in files[2:])
        except TimeoutError:
            raise RuntimeError("the sandbox does not answer") from None
        finally:
            for file in files:
                os.close(file)
        if "status" not in outcome:
            failure = outcome.get("failure", "its process was killed from outside")
            raise RuntimeError(f"the sandbox could not run a program: {failure}; {errors[-500:].strip()}")
        return ProgramRun(outcome["status"], output, errors, self.isolation)

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        SHARED_BY_CALLS.discard(self.process.pid)


class _Launchers:
    """The launchers of this process. Each starts with its first program and ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Isolation, _Launcher] = {}
        self._reasons: dict[Isolation, str | None] = {}
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._close)

    def why_not(self, isolation: Isolation) -> str | None:
        known = self._reasons
        if isolation not in known:
            known[isolation] = self._try(isolation)
        return known[isolation]

    def run(
        self, isolation: Isolation, text: str, stdin: str, limits: SandboxLimits, stop: ProgramStop | None
    ) -> ProgramRun:
        launcher = self._get(isolation)
        try:
            return launcher.run(text, stdin, limits, stop)
        except (BrokenPipeError, ConnectionResetError):  # someone killed the launcher, no program can
            self._discard(launcher)
            return self._get(isolation).run(text, stdin, limits, stop)

    def forget_reasons(self) -> None:
        """Try every kind again: the machine may have been too busy."""
        self._reasons = {}

    def _try(self, isolation: Isolation) -> str | None:
        launcher = self._get(isolation)
        if launcher.refusal is not None:
            self._discard(launcher)
            return launcher.refusal
        try:
            probe = launcher.run(_PROBE, "", SandboxLimits(timeout_seconds=_ANSWER_SECONDS))
        except RuntimeError as error:
            return str(error)
        if probe.output != "True\n":
            return (
                f"a program was not isolated, or Python did not start: {(probe.output + probe.errors)[-500:].strip()}"
            )
        return None

    def _get(self, isolation: Isolation) -> _Launcher:
        with self._lock:
            if isolation not in self._running:
                self._running[isolation] = _Launcher(isolation)
            return self._running[isolation]

    def _discard(self, launcher: _Launcher) -> None:
        with self._lock:
            if self._running.get(launcher.isolation) is launcher:
                del self._running[launcher.isolation]
                launcher.close()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        for launcher in self._running.values():
            launcher.process.returncode = 0  # not a child of this process
        self._running = {}

    def _close(self) -> None:
        for launcher in self._running.values():
            launcher.close()


_LAUNCHERS = _Launchers()


def _python() -> str:
    """The base interpreter, not a virtual environment's, whose directory is hidden from the program."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _memory_file(text: str) -> int:
    """In memory, so that nothing is left on disk whoever is killed."""
    file = os.memfd_create("areal-program")
    with open(file, "wb", closefd=False) as writer:
        writer.write(text.encode(errors="replace"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _text(file: int, most: int) -> str:
    return os.pread(file, most, 0).decode(errors="replace")
