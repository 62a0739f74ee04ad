"""Fixtures that start real runs, and end what a failed test has left running."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import CONFIG, SCRIPT, SMALL, Run, Start


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
def run_dir(tmp_path: Path) -> Path:
    """Where `example` leaves its results."""
    return tmp_path / "runs/sort-digits/one"


@pytest.fixture
def example(start: Start) -> Start:
    """Start the example's script with its config, made small; given settings win."""

    def example(*settings: str) -> Run:
        return start(SCRIPT, "--config", CONFIG, "trial_name=one", *SMALL, *settings)

    return example
