"""The compiled form of step.cpp: found in the package, found in the cache, or compiled now.

A wheel has libraries for two generations of x86 processors. Everywhere else the source is compiled on first use for the
processor at hand, which takes seconds, and kept in the user's cache directory. A library is named by everything that it
depends on, so one that does not fit is never found; it appears under its name only when it is complete. Several
processes may compile at once. This file needs no torch, but `load` wants it to be imported already: both must use one
OpenMP runtime, and torch brings its own.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from areal.api.errors import KernelUnavailable
from areal.utils.cache import cache_directory
from areal.utils.logging import getLogger

logger = getLogger("kernel")

HERE = Path(__file__).parent
SOURCE = HERE / "step.cpp"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
"""Never -ffast-math: rounding in `exponential` relies on the order of operations."""
FLAGS_VARIABLE = "AREAL_NATIVE_FLAGS"
"""Compile with these further flags, in place of -march=native and of what a wheel has."""
BUILD_SECONDS = 120.0
"""What the compiler may take; it needs about three on a quiet machine."""
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"},
}
"""What a wheel has libraries for, the best first, and the flags in /proc/cpuinfo that each needs."""


@dataclass(frozen=True)
class Library:
    name: str
    """Tells libraries apart that may round differently."""
    handle: ctypes.CDLL


@cache
def load() -> Library:
    """Raises KernelUnavailable."""
    path = find() or build()
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(f"the native kernel cannot be loaded: {error}; use rollout.kernel=torch") from None
    return Library(path.stem, handle)


def find() -> Path | None:
    """The library, if there is one already."""
    if FLAGS_VARIABLE not in os.environ and (prebuilt := _prebuilt()) is not None:
        return prebuilt
    compiler = find_compiler()
    path = None if compiler is None else _cached(compiler)
    return path if path is not None and path.exists() else None


def build() -> Path:
    """Compile the library into the cache. Raises KernelUnavailable."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelUnavailable("the native kernel needs a C++ compiler, and none was found; install g++")
    target = _cached(compiler)
    logger.info("compiling the native kernel with %s (once, some seconds)", compiler)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=target.parent) as making:
            made = Path(making) / target.name
            compile_library(compiler, made, _own_flags())
            os.replace(made, target)
    except OSError as error:
        raise KernelUnavailable(f"the native kernel cannot be kept in the cache: {error}; set AREAL_CACHE") from None
    return target


def compile_library(compiler: str, target: Path, flags: tuple[str, ...]) -> None:
    """Raises KernelUnavailable."""
    command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(target)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        said, _ = process.communicate(timeout=BUILD_SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of the compiler
        process.communicate(timeout=BUILD_SECONDS)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise KernelUnavailable(
            f"{compiler} took over {BUILD_SECONDS:g} s for the native kernel and was stopped; use rollout.kernel=torch"
        ) from None
    if process.returncode:
        lines = said.decode(errors="replace").splitlines()
        what = next((line for line in lines if "error" in line.lower()), f"exit code {process.returncode}")
        raise KernelUnavailable(f"{compiler} cannot compile the native kernel: {what}; install a current g++")


def find_compiler() -> str | None:
    """$CXX, or the first that is there; g++ is what the kernel is tested with."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if (path := shutil.which(name)) is not None:
            return path
    return None


def prebuilt_name(level: str) -> str:
    """Of a wheel's library: one of another source is not found."""
    return f"{level}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"


def _prebuilt() -> Path | None:
    if platform.system() != "Linux":
        return None
    for level, needed in LEVELS.items():
        path = HERE / "prebuilt" / prebuilt_name(level)
        if needed <= _processor_flags() and path.exists():
            return path
    return None


def _own_flags() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get(FLAGS_VARIABLE, "-march=native")))


def _cached(compiler: str) -> Path:
    """Where the library is, once this compiler has made it."""
    binary = os.stat(compiler)
    parts = [
        SOURCE.read_bytes(),
        repr((os.path.realpath(compiler), binary.st_size, binary.st_mtime_ns, FLAGS, _own_flags())).encode(),
        repr((platform.system(), platform.machine(), sorted(_processor_flags()))).encode(),
    ]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_directory() / "native" / f"native-{key}.so"


@cache
def _processor_flags() -> frozenset[str]:
    """As Linux names them; empty where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, words = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(words.split())
    except OSError:
        pass
    return frozenset()
