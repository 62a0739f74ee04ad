"""Fixtures that the tests of several packages share, and the rule that says which tests are slow.

A slow test starts a process, loads a model, or drives other people's frameworks; `make test-fast` leaves it out. Mark
one with `@pytest.mark.slow`, a file with `pytestmark = pytest.mark.slow`. Whole directories, and tests that ask for a
model by a fixture, are marked here.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW_DIRECTORIES = {"benchmarks", "e2e", "frameworks", "guides"}
MODEL_FIXTURES = {"tiny_math"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        if directory in SLOW_DIRECTORIES or MODEL_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


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
