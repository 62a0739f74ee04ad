"""Real runs take a while, and clean up after a test that failed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import CONFIG, SCRIPT, SMALL, Run

Start = Callable[..., Run]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def start(tmp_path: Path, tiny_math: Path) -> Iterator[Start]:
    """Start a command in the test's directory; the built-in model is there already."""
    runs: list[Run] = []

    def start(*argv: str | Path) -> Run:
        runs.append(Run(argv, tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture
def example(start: Start) -> Start:
    """Start the example's own script and config, with settings that win over both."""

    def example(*settings: str) -> Run:
        return start(SCRIPT, "--config", CONFIG, "trial_name=one", *SMALL, *settings)

    return example
