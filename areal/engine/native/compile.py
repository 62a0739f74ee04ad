"""How step.cpp is compiled, for the processor at hand or for a wheel. Needs nothing but the standard library, because
`setup.py` loads it by its path."""

import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
"""Never -ffast-math: rounding in `exponential` relies on the order of operations."""
BUILD_SECONDS = 120.0
"""What the compiler may take; it needs about three on a quiet machine."""
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"},
}
"""What a wheel has libraries for, the best first, and the flags in /proc/cpuinfo that each needs."""


class CompileError(Exception):
    """Says what the compiler said."""


def find_compiler() -> str | None:
    """$CXX, or the first that is there; g++ is what the kernel is tested with."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if (path := shutil.which(name)) is not None:
            return path
    return None


def compile_library(compiler: str, target: Path, flags: tuple[str, ...]) -> None:
    """Raises CompileError."""
    command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(target)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        said, _ = process.communicate(timeout=BUILD_SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # what compiles is a child of the compiler
        process.communicate(timeout=BUILD_SECONDS)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise CompileError(f"it took over {BUILD_SECONDS:g} s and was stopped") from None
    if process.returncode:
        lines = said.decode(errors="replace").splitlines()
        raise CompileError(next((line for line in lines if "error" in line.lower()), f"exit code {process.returncode}"))


def source_key() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]


def prebuilt_name(level: str) -> str:
    """Of a wheel's library. One that was made of another source has another name."""
    return f"{level}-{source_key()}.so"


def build_prebuilt(directory: Path) -> bool:
    """Compile a wheel's libraries into a directory; False where there is no compiler. Raises CompileError."""
    compiler = find_compiler()
    if compiler is None:
        return False
    directory.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        compile_library(compiler, directory / prebuilt_name(level), (f"-march={level}", "-Wl,-s"))
    return True
