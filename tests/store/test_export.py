"""What is exported from a store is what was put into it, in files that others read."""

import base64
import dataclasses
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.api.errors import RejectReason
from areal.api.messages import Episode, Node, Rejection, Row, TrainedRow
from areal.cli import main as command
from areal.store.records import StepRecord
from areal.store.schema import STORE_FILE
from areal.store.writer import StoreWriter
from areal.trainer.logs import RolloutLog
from areal.utils.installing import install_hint
from tests.store.test_store import episode, group, row, step_of

NODE = Node(None, False, [], {"role": "assistant", "content": "on a branch"}, None, "stop", [], 0.0, 0.5)
ODD = [{"role": "assistant", "content": "half \ud800 of a pair", "number": 2**70}]


def trained(sent: Episode) -> list[TrainedRow]:
    tokens = sent.trained_tokens
    logprobs = np.linspace(-1, 0, tokens, dtype=np.float32)
    return [TrainedRow(np.full(tokens, 0.5, np.float32), logprobs, -logprobs)]


def write_run(store: StoreWriter) -> None:
    """Five steps of one group each, a group that is rejected and one that waits."""
    for step in range(1, 6):
        store.ready(group(step))
        store.step(dataclasses.replace(step_of(step, step), trained={step: [trained(episode()), []]}))
    store.rejected(group(6), Rejection(RejectReason.STALE, "too old"))
    with_image = dataclasses.replace(row(), images=[b"\x89PNG"])
    store.ready(group(7, Episode([with_image], 0.25, ODD, nodes=[NODE]), Episode([], 0.0)))
    store.flush()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path) as store:
        write_run(store)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_have_what_rollouts_have_and_every_array(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["export", str(run)]) == 0
    assert capsys.readouterr().out.split() == ["14", f"{run}/export/episodes.jsonl", "5", f"{run}/export/metrics.jsonl"]
    exported = lines(run / "export/episodes.jsonl")
    assert [each["step"] for each in exported] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, None, None]
    RolloutLog(run, 1).close()
    rollout = lines(run / "rollouts.jsonl")[0]
    assert {name: exported[0][name] for name in rollout} == rollout
    (sent,), (found,) = episode().rows, exported[0]["rows"]
    for field in dataclasses.fields(Row):
        value = getattr(sent, field.name)
        assert found[field.name] == pytest.approx(value.tolist() if isinstance(value, np.ndarray) else value)
    mask = sent.loss_mask
    assert found["advantages"] == np.where(mask, 0.5, None).tolist()
    assert [each is None for each in found["trainer_logprobs"]] == (~mask).tolist()
    assert exported[1]["rows"][0]["advantages"] is None, "it was not handed over for this sample"
    assert [each["state"] for each in exported[-4:]] == ["rejected", "rejected", "ready", "ready"]
    assert exported[-2]["messages"] == ODD
    assert [node["message"]["content"] for node in exported[-2]["nodes"]] == ["on a branch"]
    assert [base64.b64decode(each) for each in exported[-2]["rows"][0]["images"]] == [b"\x89PNG"]
    assert lines(run / "export/metrics.jsonl")[0] == {"step": 1, "reward": 0.5, "unknown": None}


def test_parquet_holds_the_same(run: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    command.main(["export", str(run)])
    assert command.main(["export", str(run), "--format", "parquet"]) == 0
    expected = lines(run / "export/episodes.jsonl")
    found = parquet.read_table(run / "export/episodes.parquet").to_pylist()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in ("messages", "stats", "nodes"):
            one[name] = json.loads(one[name])
        one["turns"] = [[turn["asked"], turn["answered"], turn["tokens"]] for turn in one["turns"]]
        for each in one["rows"]:
            each["images"] = [base64.b64encode(image).decode() for image in each["images"]]
            for name in ("advantages", "trainer_logprobs", "entropies"):
                each[name] = each[name] and [None if value != value else value for value in each[name]]
            for name in ("logprobs", "trainer_logprobs", "entropies"):
                each[name] = each[name] and [value and np.float32(value) for value in each[name]]
        for each in other["rows"]:
            for name in ("logprobs", "trainer_logprobs", "entropies"):
                each[name] = each[name] and [value and np.float32(value) for value in each[name]]
        assert one == other
    figures = parquet.read_table(run / "export/metrics.parquet").to_pylist()
    assert figures[4] == {"step": 5, "reward": 0.5, "unknown": None}


def test_parquet_without_pyarrow_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert command.main(["export", str(run), "--format", "parquet"]) == 2
    assert capsys.readouterr().err.endswith(f"; {install_hint('datasets')}\n")
    assert not (run / "export").exists()


def test_steps_and_filter_choose(run: Path) -> None:
    words = ["export", str(run), "--steps", "2-3", "--filter", 'reward<0.5 "eight"', "--out", str(run / "some")]
    assert command.main(words) == 0
    assert [(each["step"], each["reward"]) for each in lines(run / "some/episodes.jsonl")] == [(2, 0.0), (3, 0.0)]
    assert [each["step"] for each in lines(run / "some/metrics.jsonl")] == [2, 3]


def test_a_run_that_goes_on_can_be_exported(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        write_run(store)
        assert command.main(["export", str(tmp_path)]) == 0
        store.ready(group(8))
        store.step(StepRecord(6, 6, "", [8], {}, {}))
        assert command.main(["export", str(tmp_path), "--steps", "6..", "--force"]) == 0
    assert [each["task_id"] for each in lines(tmp_path / "export/episodes.jsonl")] == [8, 8]


def test_tokens_that_are_not_kept_leave_rows_out(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        write_run(store)
        store.forget_tokens(before_step=5)
    assert command.main(["export", str(tmp_path), "--steps", "4-5"]) == 0
    exported = lines(tmp_path / "export/episodes.jsonl")
    assert [len(each["rows"]) for each in exported] == [0, 0, 1, 1, 1, 1]
    assert exported[0]["messages"] == episode().messages


def test_what_exists_is_overwritten_only_by_force_and_an_error_leaves_no_file(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "export").mkdir()
    (run / "export/metrics.jsonl").write_text("mine\n")
    assert command.main(["export", str(run)]) == 2
    said = f"but {run}/export/metrics.jsonl exists; choose another --out or add --force\n"
    assert capsys.readouterr().err == f"areal: an export writes new files, {said}"
    assert [each.name for each in (run / "export").iterdir()] == ["metrics.jsonl"]

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("areal.store.export.episode_record", broken)
    assert command.main(["export", str(run), "--force"]) == 130
    assert [each.name for each in (run / "export").iterdir()] == ["metrics.jsonl"]
    assert (run / "export/metrics.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no run store at nowhere/run.db"),
        (["RUN", "--steps", "5-2"], "--steps: a range must go up"),
        (["RUN", "--steps", "soon"], "--steps: a range is 300-500"),
        (["RUN", "--filter", "rewrad<1"], "did you mean reward?"),
        (["RUN", "--out", "/proc/nothing"], "cannot be written"),
        (["RUN", "--out", __file__], "cannot be written"),
    ],
)
def test_wrong_words_are_one_line(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["export", *(str(run) if word == "RUN" else word for word in words)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_what_is_said_on_a_branch_is_found(run: Path) -> None:
    assert command.main(["export", str(run), "--filter", '"on a branch"']) == 0
    assert [each["task_id"] for each in lines(run / "export/episodes.jsonl")] == [7]


def test_damage_is_one_line_and_other_steps_can_be_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(run / STORE_FILE) as db:
        db.execute("UPDATE rows SET data = x'00' WHERE task_id = 1")
    assert command.main(["export", str(run)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert list((run / "export").iterdir()) == []
    assert command.main(["export", str(run), "--steps", "2.."]) == 0
