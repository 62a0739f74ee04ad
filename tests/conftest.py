"""Fixtures that the tests of several packages share, and the rule that says which tests are slow.

A slow test starts a process, makes or loads a model, drives other people's frameworks or searches many cases;
`make test-fast` leaves it out. Mark one with `@pytest.mark.slow`, a file with `pytestmark = pytest.mark.slow`. Whole
directories, property tests, and tests that ask for a model by a fixture are marked here.
"""

import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from areal.utils.logging import getLogger

with suppress(ImportError):  # not every environment has it
    from hypothesis import HealthCheck, settings

    # Machines are noisy: no test depends on how long it takes, or its inputs.
    settings.register_profile("areal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("areal")

TESTS = Path(__file__).parent
SLOW_DIRECTORIES = {"benchmarks", "e2e", "frameworks", "guides"}
MODEL_FIXTURES = {"tiny_math"}


def pytest_configure(config: pytest.Config) -> None:
    getLogger()  # pytest listens only to loggers that are set up when a test begins
    if _is_fast(config):
        config.pluginmanager.register(_NoProcesses())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Fast runs do not import what they leave out: the libraries there take seconds to load."""
    slow = collection_path.parent == TESTS and collection_path.name in SLOW_DIRECTORIES
    return True if slow and _is_fast(config) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow(item):
            item.add_marker(pytest.mark.slow)


def _is_slow(item: pytest.Item) -> bool:
    searches = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    asks_for_a_model = MODEL_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    return bool(searches or asks_for_a_model) or item.path.relative_to(TESTS).parts[0] in SLOW_DIRECTORIES


def _is_fast(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


class _NoProcesses:
    """Fails a test that starts a process although it is not marked slow."""

    def __init__(self) -> None:
        self._commands: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and arguments[0] != "uname":  # libraries ask it for the processor's name
            self._commands.append(str(arguments[1]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        self._commands.clear()
        yield
        if self._commands:
            pytest.fail(f"{item.name} starts a process, so mark it with @pytest.mark.slow: {self._commands[0]}")


@pytest.fixture(scope="session")
def tiny_math() -> Path:
    """The built-in model, from the user's cache as in a real run: the first session makes it (15–30 s)."""
    from areal.engine.models import find_model  # here, so that tests without a model need no torch

    return find_model("builtin:tiny-math")


@pytest.fixture(scope="session")
def vision_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and processor of a vision model, without the model."""
    from tiny_processor import save_processor

    directory = tmp_path_factory.mktemp("vision")
    save_processor(directory)
    return directory
