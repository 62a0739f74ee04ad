"""The compiled form of step.cpp: found in the package, found in the cache, or compiled now.

A wheel has libraries for two generations of x86 processors. Everywhere else the source is compiled on first use for the
processor at hand, which takes seconds, and kept in the user's cache directory. A library is named by everything that it
depends on, so one that does not fit is never found. It appears under its name only when it is complete, and ends with a
checksum, because a process that maps a damaged one dies without a word. Several processes may compile at once. This
file needs no torch, but `load` wants it to be imported already: both must use one OpenMP runtime, and torch brings its
own.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from areal.api.errors import KernelUnavailable
from areal.engine.native.compile import (
    BUILD_SECONDS,
    FLAGS,
    LEVELS,
    CompileError,
    compile_library,
    find_compiler,
    prebuilt_name,
    source_key,
)
from areal.utils.cache import cache_directory
from areal.utils.logging import getLogger

logger = getLogger("kernel")

PREBUILT = Path(__file__).with_name("prebuilt")
"""What a wheel has."""
_MAKING = "making-"
"""How directories begin in which a library is being compiled."""
FLAGS_VARIABLE = "AREAL_NATIVE_FLAGS"
"""Compile with these further flags, in place of -march=native and of what a wheel has."""


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
    return path if path is not None and _is_whole(path) else None


def build() -> Path:
    """Compile the library into the cache. Raises KernelUnavailable."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelUnavailable("the native kernel needs a C++ compiler, and none was found; install g++")
    target = _cached(compiler)
    logger.info("compiling the native kernel with %s (once, some seconds)", compiler)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target.parent)
        with tempfile.TemporaryDirectory(prefix=_MAKING, dir=target.parent) as making:
            made = Path(making) / target.name
            compile_library(compiler, made, _own_flags())
            _seal(made)
            os.replace(made, target)
    except CompileError as error:
        raise KernelUnavailable(
            f"{compiler} cannot compile the native kernel: {error}; install a current g++, or use rollout.kernel=torch"
        ) from None
    except OSError as error:
        raise KernelUnavailable(f"the native kernel cannot be kept in the cache: {error}; set AREAL_CACHE") from None
    return target


def _seal(path: Path) -> None:
    """Add a checksum, which loaders do not read, and write it all to the disk."""
    with open(path, "rb+") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def _remove_left_over(directory: Path) -> None:
    """What processes left that were killed while they compiled."""
    for path in directory.glob(f"{_MAKING}*"):
        with suppress(FileNotFoundError):  # another process has just finished
            if time.time() - path.stat().st_mtime > 2 * BUILD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _prebuilt() -> Path | None:
    if platform.system() != "Linux" or not PREBUILT.is_dir():
        return None
    fitting = [PREBUILT / prebuilt_name(level) for level, needed in LEVELS.items() if needed <= _processor_flags()]
    return next((path for path in fitting if path.exists()), None)


def _own_flags() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get(FLAGS_VARIABLE, "-march=native")))


def _cached(compiler: str) -> Path:
    """Where the library is, once this compiler has made it."""
    binary = os.stat(compiler)
    facts = (
        source_key(),
        (os.path.realpath(compiler), binary.st_size, binary.st_mtime_ns, FLAGS, _own_flags()),
        (platform.system(), platform.machine(), sorted(_processor_flags())),
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
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
    except OSError:  # another system
        pass
    return frozenset()
