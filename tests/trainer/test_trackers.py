"""Trackers: what a run sends, how it goes on, what happens when one fails; the libraries that are here, offline."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import make_group

from areal.api.errors import ConfigError
from areal.config.experiment import SFTConfig
from areal.config.training import TrackingConfig
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter
from areal.trainer import trackers, trainers
from areal.trainer.logs import MetricsLog
from areal.trainer.tracker_kinds import KINDS, TrackedRun
from areal.trainer.trackers import Trackers


class Kept:
    """A tracker that keeps what it is told, under the name it gave the run."""

    told: dict[str, list[Any]]

    def __init__(self, run: TrackedRun, known: str | None) -> None:
        self.run = run
        self.id = known or f"run {len(self.told)}"
        self.told.setdefault(self.id, [])

    def figures(self, step: int, values: Any) -> None:
        self.told[self.id].append((step, dict(values)))

    def table(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self.told[self.id].append((step, columns, rows))

    def finish(self) -> None:
        self.told[self.id].append("end")


class Failing(Kept):
    def figures(self, step: int, values: Any) -> None:
        raise ConnectionError("nobody is there")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    monkeypatch.setattr(Kept, "told", found, raising=False)
    monkeypatch.setitem(KINDS, "wandb", Kept)
    monkeypatch.setitem(KINDS, "mlflow", Failing)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreWriter]:
    with StoreWriter(tmp_path) as writer:
        yield writer


def commit(store: StoreWriter, step: int) -> None:
    store.step(StepRecord(step, step, "", [], {"loss": step / 10}, {}))
    store.flush()


def config(tracker: str, **settings: Any) -> SFTConfig:
    return SFTConfig(experiment_name="project", tracker=tracker, tracking=TrackingConfig(offline=True, **settings))


def test_resumed_run_goes_on_with_its_tracker_and_sends_each_line_once(
    tmp_path: Path, store: StoreWriter, told: dict[str, list[Any]]
) -> None:
    commit(store, 1)
    with Trackers(config("wandb"), tmp_path) as sent, MetricsLog(tmp_path, 1, trackers=sent) as log:
        commit(store, 2)
        log.write(2, {"loss": 0.2, "nothing": None})
        log.write(2, {"eval_accuracy": 0.5})
    for step in (3, 4):  # a killed process has committed it and not sent it
        commit(store, step)
    with Trackers(config("wandb"), tmp_path) as sent, MetricsLog(tmp_path, 4, trackers=sent) as log:
        log.write(5, {"loss": 0.5})
    first = [(1, {"loss": 0.1}), (2, {"loss": 0.2}), (2, {"eval_accuracy": 0.5}), "end"]
    assert told == {"run 0": [*first, (3, {"loss": 0.3}), (4, {"loss": 0.4}), (5, {"loss": 0.5}), "end"]}
    # Steps that are taken again from an older checkpoint are there already.
    with Trackers(config("wandb"), tmp_path) as sent:
        for step in (4, 5, 6):
            sent.figures(step, {"loss": step / 10})
    assert told["run 0"][-2:] == [(6, {"loss": 0.6}), "end"]


def test_tracker_that_fails_is_warned_of_once_and_others_go_on(
    tmp_path: Path, store: StoreWriter, told: dict[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with Trackers(config("wandb, mlflow"), tmp_path) as sent:
        for step in (1, 2, 3):
            sent.figures(step, {"loss": 0.1})
    assert len(told["run 0"]) + len(told["run 1"]) == 5  # three lines and two ends
    warnings = [record.getMessage() for record in caplog.records]
    assert [text for text in warnings if "tracker mlflow fails (ConnectionError: nobody is there)" in text] == warnings
    assert len(warnings) == 1


def test_tracker_that_hangs_does_not_hold_up_the_end_of_a_run(
    tmp_path: Path, told: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()
    monkeypatch.setattr(Kept, "figures", lambda *_: free.wait(60))
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    with Trackers(config("wandb"), tmp_path) as sent:
        sent.figures(1, {"loss": 0.1})
    assert "has not taken all figures" in caplog.text
    free.set()


def test_trackers_that_hang_are_waited_for_together(
    tmp_path: Path, told: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Trackers(config("wandb, mlflow, trackio"), tmp_path)
    now, waited = [100.0], []

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        assert timeout is not None
        waited.append(timeout)
        now[0] += timeout

    with monkeypatch.context() as patched:
        patched.setattr("areal.trainer.trackers.time.monotonic", lambda: now[0])
        patched.setattr(threading.Thread, "join", join)
        sent.close()
    assert waited == [trackers.CLOSE_SECONDS, 0.0, 0.0]


def test_tracker_that_fell_behind_misses_no_step(
    tmp_path: Path,
    store: StoreWriter,
    told: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    busy, free, drained = threading.Event(), threading.Event(), threading.Event()

    class Slow(Kept):
        def figures(self, step: int, values: Any) -> None:
            busy.set()
            assert free.wait(30)
            super().figures(step, values)
            if step == 3:
                drained.set()

    monkeypatch.setitem(KINDS, "wandb", Slow)
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    with Trackers(config("wandb"), tmp_path) as sent:
        for step in range(1, 7):
            commit(store, step)
            sent.figures(step, {"loss": step / 10})
            assert busy.wait(30)
            if step == 4:  # 1 is being sent, 2 and 3 wait, 4 has no place
                free.set()
                assert drained.wait(30)
    assert [line[0] for line in told["run 0"][:-1]] == [1, 2, 3]
    assert caplog.text.count("those after step 3 are sent when the run is started again") == 1
    with Trackers(config("wandb"), tmp_path) as sent:
        sent.catch_up(6)
    assert [line[0] for line in told["run 0"] if line != "end"] == [1, 2, 3, 4, 5, 6]


def test_tracker_that_exits_is_warned_of(
    tmp_path: Path, told: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(run: TrackedRun, known: str | None) -> Any:
        raise SystemExit("log in first")

    monkeypatch.setitem(KINDS, "wandb", leave)
    with Trackers(config("wandb"), tmp_path) as sent:
        sent.figures(1, {"loss": 0.1})
    assert "tracker wandb fails (SystemExit: log in first)" in caplog.text


def test_some_conversations_are_shown_now_and_then(tmp_path: Path, told: dict[str, list[Any]]) -> None:
    groups = [make_group(0, [1.0, 0.0])]
    with Trackers(config("wandb", rollouts_every=3, rollouts=1), tmp_path) as sent:
        for step in range(1, 6):
            sent.rollouts(step, groups)
    tables = told["run 0"][:-1]
    assert [step for step, _, _ in tables] == [1, 4]
    _, columns, rows = tables[0]
    assert columns == ["step", "task", "reward", "transcript"]
    assert len(rows) == 1


def test_trackers_are_named_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SFTConfig(tracker="wandb, mlflow,wandb").trackers == ["wandb", "mlflow"]
    with pytest.raises(ConfigError, match="tracker must be one of wandb, mlflow, trackio, swanlab, got 'w&b'"):
        SFTConfig(tracker="w&b")
    monkeypatch.setattr(trainers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install swanlab"):
        trainers.check_trackers(SFTConfig(tracker="swanlab"))


def read_wandb(directory: Path) -> None:
    found = sorted((directory / "wandb").glob("offline-run-*"))
    assert len(found) == 2
    assert len({path.name.rpartition("-")[2] for path in found}) == 1, "both sessions belong to one run"
    assert all(list(path.glob("*.wandb")) for path in found)
    tables = [path for each in found for path in each.glob("files/media/table/*.json")]
    assert "hello" in tables[0].read_text()


def read_mlflow(directory: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
    identity = json.loads((directory / "mlflow.json").read_text())["id"]
    assert [(each.step, each.value) for each in client.get_metric_history(identity, "loss")] == [(1, 0.5), (2, 0.25)]
    run = client.get_run(identity)
    assert (run.info.run_name, run.info.status, run.data.params["actor.path"]) == ("one", "FINISHED", "builtin:tiny")
    (table,) = client.list_artifacts(identity, "rollouts")
    assert table.path == "rollouts/step-000001.json"


def read_trackio(directory: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    identity = json.loads((directory / "trackio.json").read_text())["id"]
    logs = SQLiteStorage.get_logs("project", identity)
    assert [(each["step"], each["loss"]) for each in logs if "loss" in each] == [(1, 0.5), (2, 0.25)]
    assert "hello" in json.dumps([each for each in logs if "rollouts" in each])


def read_swanlab(directory: Path) -> None:
    found = sorted((directory / "swanlog").glob("run-*"))
    assert len({path.name.rpartition("-")[2] for path in found}) == 1, "both sessions belong to one run"
    texts = [path.read_text() for path in (directory / "swanlog").glob("run-*/media/text/*")]
    assert any("hello" in text for text in texts)


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio, "swanlab": read_swanlab}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READERS)
def test_library_takes_what_a_run_sends_and_goes_on_with_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    if name == "mlflow":
        pytest.importorskip("sqlalchemy")
    if name == "trackio":
        from trackio import sqlite_storage

        monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    run = TrackedRun("project", "one", True, tmp_path, {"actor.path": "builtin:tiny", "seed": 1})
    known = None
    for step, loss in ((1, 0.5), (2, 0.25)):
        tracker = KINDS[name](run, known)
        assert known in (None, tracker.id)
        known = tracker.id
        tracker.figures(step, {"loss": loss})
        if step == 1:
            tracker.table(step, ["step", "transcript"], [[1, "hello"], [1, "there"]])
        tracker.finish()
    (tmp_path / f"{name}.json").write_text(json.dumps({"id": known}))
    READERS[name](tmp_path)
