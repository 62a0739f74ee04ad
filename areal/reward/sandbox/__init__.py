"""Run an untrusted program, one that a model wrote.

`run_program` starts Python without environment variables, in an empty directory, with limits on time, memory, output,
files and processes, and in the end kills it and everything it started. `ProgramRun.isolation` says what kept it from
the network and from other files:

- `namespaces`: the kernel. No network interface, no other process, and of the file system only the Python installation,
  read-only. Linux 5.12 or newer, as root, or as any user where unprivileged user namespaces are allowed.
- `guard`: an audit hook in the program's own interpreter, which refuses sockets, processes, signals, ctypes, and files
  outside its directory. It stops careless code, not an attacker who brings machine code.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from areal.config.errors import require

_HERE = Path(__file__).parent
_REAP_SECONDS = 10.0

Isolation = Literal["namespaces", "guard"]


@dataclass(frozen=True)
class SandboxLimits:
    timeout_seconds: float = 10.0
    """From start to end; then everything is killed."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    output_bytes: int = 1 << 20
    """Of standard output, of standard error, and of any file."""
    processes: int = 16
    """Processes and threads at one time. The guard allows one process, and counts its threads only for root."""
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
    isolation: Isolation | None
    """None = it was killed before it could report."""


def run_program(
    text: str,
    stdin: str = "",
    limits: SandboxLimits = SandboxLimits(),  # noqa: B008  (frozen)
    *,
    namespaces: bool = True,
) -> ProgramRun:
    """Run a Python program until it ends or reaches its deadline. `namespaces=False` uses the guard at once."""
    require(sys.platform == "linux", f"programs run in a sandbox on Linux only, this is {sys.platform}")
    with (
        tempfile.TemporaryDirectory(prefix="areal-program-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile() as standard_in,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        Path(scratch, "main.py").write_bytes(text.encode(errors="replace"))
        standard_in.write(stdin.encode(errors="replace"))
        standard_in.seek(0)
        report = _launch(scratch, (standard_in, output, errors), limits, namespaces)
        standard_out, standard_err = (_read(file, limits.output_bytes) for file in (output, errors))
    if report == b"":
        raise RuntimeError(f"the sandbox ended without a report: {standard_err[-500:].strip()}")
    status, isolation = json.loads(report) if report is not None else (None, None)
    return ProgramRun(status, standard_out, standard_err, isolation)


def _launch(scratch: str, streams: tuple[IO[bytes], ...], limits: SandboxLimits, namespaces: bool) -> bytes | None:
    """The launcher's report; None = the deadline came first."""
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as report:
        try:
            process = subprocess.Popen(
                [_python(), "-I", "-S", str(_HERE / "launcher.py"), _job(scratch, theirs, limits, namespaces)],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                cwd=scratch,
                env={},
                pass_fds=(theirs,),
                process_group=0,
            )
        finally:
            os.close(theirs)
        try:
            ready, _, _ = select.select([report], [], [], limits.timeout_seconds)
            return report.read() if ready else None
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the process id is still its own
            process.wait(_REAP_SECONDS)


def _python() -> str:
    """The base interpreter, not a virtual environment's, whose directory is hidden from the program."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _job(scratch: str, report: int, limits: SandboxLimits, namespaces: bool) -> str:
    job: dict[str, Any] = {
        "parent": os.getpid(),
        "scratch": scratch,
        "report": report,
        "namespaces": namespaces,
        "guard": (_HERE / "guard.py").read_text(encoding="utf-8"),
        "memory_bytes": limits.memory_bytes,
        "cpu_seconds": math.ceil(limits.timeout_seconds) + 1,
        "output_bytes": limits.output_bytes,
        "processes": limits.processes,
        "open_files": limits.open_files,
    }
    return json.dumps(job)


def _read(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")
