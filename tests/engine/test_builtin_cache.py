"""A built-in model is made once, and an attempt that ends early leaves nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal.engine.builtin.text import cached
from areal.engine.model_path import Report


def quiet(text: str, share: float) -> None:
    return


def write(directory: Path, report: Report) -> None:
    (directory / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    return tmp_path


def names(cache: Path) -> list[str]:
    return sorted(each.name for each in cache.iterdir())


def test_model_is_made_once(cache: Path) -> None:
    assert cached("small", write, quiet) == cache / "small"
    assert cached("small", lambda directory, report: pytest.fail("made again"), quiet) == cache / "small"
    assert names(cache) == ["small"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
def test_interrupted_attempt_leaves_nothing(cache: Path, error: type[BaseException]) -> None:
    def fail(directory: Path, report: Report) -> None:
        (directory / "half").write_text("")
        raise error

    with pytest.raises(error):
        cached("small", fail, quiet)
    assert names(cache) == []


def test_one_that_another_process_made_meanwhile_is_taken(cache: Path) -> None:
    def slow(directory: Path, report: Report) -> None:
        write(directory, report)
        cached("small", write, quiet)

    assert cached("small", slow, quiet) == cache / "small"
    assert names(cache) == ["small"]


KILLED = """
import os, signal, sys
from areal.engine.builtin.text import cached

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def make(directory, report):
    (directory / "half").write_text("")
    print(flush=True)
    signal.pause()

cached("other", make, None)
"""


@pytest.mark.slow
def test_attempt_of_a_killed_process_is_removed_and_one_that_goes_on_is_not(cache: Path) -> None:
    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=os.environ)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    with start() as killed, start() as working:
        killed.kill()
        killed.wait(60)
        assert len(names(cache)) == 2
        cached("small", write, quiet)
        assert len(names(cache)) == 2
        working.send_signal(signal.SIGINT)
        working.wait(60)
    assert names(cache) == ["small"]
