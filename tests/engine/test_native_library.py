"""The native kernel's library: made once, whole or not at all, and where it cannot be made torch computes."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import training_engine

from areal.api.errors import ConfigError, KernelUnavailable
from areal.config.rollout import RolloutConfig
from areal.engine.inference import kernels
from areal.engine.inference.decoder_runner import DecoderRunner
from areal.engine.inference.torch_kernel import TorchKernel
from areal.engine.model.device import CPU
from areal.engine.native import compile as compiling
from areal.engine.native import kernel as kernel_module
from areal.engine.native import library

pytestmark = pytest.mark.slow

HAS_COMPILER = library.find_compiler() is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
QUICK = "-O0 -march=native"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and flags that compile quickly."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    monkeypatch.setenv(library.FLAGS_VARIABLE, QUICK)
    return tmp_path / "native"


def compiler(directory: Path, script: str) -> str:
    path = directory / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_a_library_is_made_once_for_the_same_source_compiler_and_flags(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.find() is None
    made = library.build()
    assert library.find() == made
    assert list(place.iterdir()) == [made]
    monkeypatch.setenv(library.FLAGS_VARIABLE, "-O0")
    assert library.find() is None
    monkeypatch.setenv(library.FLAGS_VARIABLE, QUICK)
    changed = place / "step.cpp"
    changed.write_bytes(compiling.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(compiling, "SOURCE", changed)
    assert library.find() is None


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.99])
def test_a_library_that_was_damaged_is_made_again(place: Path, share: float) -> None:
    made = library.build()
    whole = made.read_bytes()
    made.write_bytes(whole[: int(share * len(whole))])
    assert library.find() is None
    assert library.build() == made == library.find()


@needs_compiler
def test_what_another_process_has_just_removed_stops_no_build(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "making-gone").symlink_to(place / "nowhere")
    assert library.build().exists()


@needs_compiler
def test_processes_that_start_together_all_have_it(place: Path) -> None:
    code = "from areal.engine.native import library; print(library.find() or library.build())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    made = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 3
    assert made == {str(path) for path in place.iterdir()}
    assert len(made) == 1


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "making-killed").mkdir(parents=True)
    os.utime(place / "making-killed", (0, 0))  # of a process that was killed long ago
    monkeypatch.setenv("CXX", compiler(place.parent, "echo 'step.cpp:1:1: error: I am too old' >&2; exit 1"))
    with pytest.raises(KernelUnavailable, match=r"cannot compile the native kernel: .*I am too old; install"):
        library.build()
    assert list(place.iterdir()) == []


def test_a_compiler_that_hangs_is_ended_with_its_children(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = place.parent / "children"
    monkeypatch.setenv("CXX", compiler(place.parent, f"sleep 1000 & echo $! > {children}; wait"))
    monkeypatch.setattr(compiling, "BUILD_SECONDS", 1.0)
    with pytest.raises(KernelUnavailable, match="took over 1 s and was stopped"):
        library.build()
    assert list(place.iterdir()) == []
    child = Path("/proc") / children.read_text().strip() / "status"
    assert not child.exists() or "(zombie)" in child.read_text()


def test_without_a_compiler_it_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(place))
    assert library.find() is None
    with pytest.raises(KernelUnavailable, match="needs a C\\+\\+ compiler, and none was found; install g\\+\\+"):
        library.build()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(KernelUnavailable, match=r"cannot be kept in the cache: .*; set AREAL_CACHE"):
        library.build()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the engine logs."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keeper = Keeper()
    kernels.logger.addHandler(keeper)
    yield lines
    kernels.logger.removeHandler(keeper)


def refuse() -> Any:
    raise KernelUnavailable("the native kernel needs a C++ compiler, and none was found; install g++")


def test_where_it_cannot_be_had_torch_computes_and_one_line_says_why(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_module, "load", refuse)
    monkeypatch.setattr(kernels, "load", refuse)
    decoder = training_engine().decoder
    runner = DecoderRunner(decoder)
    assert isinstance(runner.kernel, TorchKernel)
    (line,) = said
    assert "computes with torch" in line
    assert "install g++" in line
    assert kernels.kernel_name("auto", CPU) == "torch"
    with pytest.raises(KernelUnavailable, match=r"install g\+\+"):
        DecoderRunner(decoder, kernel="native")
    DecoderRunner(decoder, kernel="torch")
    assert len(said) == 1


def test_a_wheels_library_is_chosen_by_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.FLAGS_VARIABLE, raising=False)
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    old, new = (tmp_path / "prebuilt" / library.prebuilt_name(level) for level in ("x86-64-v3", "x86-64-v4"))
    old.parent.mkdir()
    old.touch()
    new.touch()
    flags = library.LEVELS["x86-64-v3"]
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset(flags))
    assert library.find() == old
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset(flags | library.LEVELS["x86-64-v4"]))
    assert library.find() == new
    monkeypatch.setattr(library, "_processor_flags", lambda: frozenset({"sse2"}))
    assert library.find() is None


def test_the_setting_is_refused_where_it_means_nothing() -> None:
    assert RolloutConfig().kernel == "auto"
    with pytest.raises(ConfigError, match="kernel=native computes on CPUs, got device=cuda; use kernel=auto"):
        RolloutConfig(kernel="native", device="cuda")


@needs_compiler
def test_torch_and_the_library_use_one_openmp() -> None:
    import torch  # it brings the runtime

    assert torch.get_num_threads()
    library.load()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len({os.path.realpath(path) for path in runtimes}) == 1
