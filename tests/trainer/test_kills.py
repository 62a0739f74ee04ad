"""A driver that is killed at any moment loses nothing that is finished, and a resumed run trains each task once."""

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import killed_runs
import pytest
from fleet_of_groups import save_model
from killed_runs import MOMENTS, check_record, check_weights
from small_runs import make_engine

from areal.store.reader import StoreReader

pytestmark = pytest.mark.slow

RUN_SECONDS = 300

Train = Callable[[str], str]
"""Until a moment; returns what was printed."""


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Processes of their own, which begin with everything imported."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["killed_runs"])
    save_model(tmp_path / "model", make_engine())

    def train(moment: str) -> str:
        process = processes.Process(target=killed_runs.train, args=(tmp_path, tmp_path / "model", moment))
        process.start()
        process.join(RUN_SECONDS)
        printed = (tmp_path / "printed").read_text()
        assert process.exitcode == (0 if moment == "never" else -signal.SIGKILL), printed
        return printed

    return train


def begun(tmp_path: Path) -> list[int]:
    path = tmp_path / "begun"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != "never"])
def test_every_task_is_trained_once_whenever_the_driver_is_killed(tmp_path: Path, train: Train, moment: str) -> None:
    run_dir = tmp_path / "test/one"
    train(moment)
    with StoreReader(run_dir) as reader:
        finished = {group.task_id for group in reader.ready()} | set(reader.settled())
    first = begun(tmp_path)
    assert "are not those that the run had" not in train("never")

    again = begun(tmp_path)[len(first) :]
    assert max(Counter(again).values(), default=1) == 1
    assert not finished & set(again), "a finished group was generated again"
    check_record(run_dir)
    check_weights(tmp_path, tmp_path / "model", run_dir)
