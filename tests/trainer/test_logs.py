"""metrics.jsonl, TensorBoard and rollouts.jsonl: readable at once, and brought to what the run's store has."""

import errno
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from small_runs import make_conversation

from areal.api.messages import GroupResult
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter
from areal.trainer.logs import MetricsLog, RolloutLog, finite, read_metrics


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreWriter]:
    with StoreWriter(tmp_path) as writer:
        yield writer


def commit(store: StoreWriter, step: int, *groups: GroupResult, reward: float = 0.0) -> None:
    for group in groups:
        store.ready(group)
    batch = [group.task_id for group in groups]
    store.step(StepRecord(step, step, f"digest {step}", batch, {"reward": reward}, {}))


@pytest.mark.usefixtures("store")
def test_each_step_is_one_json_line_that_is_readable_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"reward": 0.5, "loss": np.float32(0.25)})
        assert read_metrics(tmp_path) == [{"step": 0, "reward": 0.5, "loss": 0.25}]
        log.write(1, {"step": 1, "reward": 0.75})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_value_that_json_cannot_say_becomes_null(value: float | None) -> None:
    assert finite({"step": 3, "reward": value}) == {"reward": None}


def test_a_log_that_is_opened_drops_steps_that_were_taken_back(tmp_path: Path, store: StoreWriter) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1, 5):
            commit(store, step, reward=step)
            log.write(step, {"reward": step})
    store.take_back(2)
    store.flush()
    with MetricsLog(tmp_path, 2) as log:
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
        commit(store, 3, reward=30)
        log.write(3, {"reward": 30})
    assert [row["reward"] for row in read_metrics(tmp_path)] == [1, 2, 30]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_log_that_is_opened_gets_what_a_killed_run_did_not_come_to_write(tmp_path: Path, store: StoreWriter) -> None:
    for step in (1, 2):
        commit(store, step, reward=step)
    store.evaluation(2, {"eval_reward": 0.5}, {})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1}\n{"step": 2, "rew')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    MetricsLog(tmp_path, 2).close()
    rows = [{"step": 1, "reward": 1}, {"step": 2, "reward": 2}, {"step": 2, "eval_reward": 0.5}]
    assert read_metrics(tmp_path) == rows
    (tmp_path / "metrics.jsonl").unlink()
    MetricsLog(tmp_path, 2).close()
    assert read_metrics(tmp_path) == rows


def test_lines_from_before_there_was_a_store_stay(tmp_path: Path, store: StoreWriter) -> None:
    old = '{"step": 0, "eval_reward": 0}\n{"step": 1, "reward": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(f'{old}damaged\n{{"step": 4, "reward": 4}}\n')
    commit(store, 2, reward=2)
    commit(store, 3, reward=3)
    MetricsLog(tmp_path, 3).close()
    assert (tmp_path / "metrics.jsonl").read_text().startswith(old)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]


def scalars(run_dir: Path) -> list[tuple[int, str, float]]:
    """What a reader of the event files sees, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import masked_crc32c

    found: list[tuple[int, str, float]] = []
    for path in sorted((run_dir / "tensorboard").glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            record, checks = content[12 : 12 + length], (content[8:12], content[12 + length : 16 + length])
            assert [masked_crc32c(content[:8]), masked_crc32c(record)] == [int.from_bytes(c, "little") for c in checks]
            event, content = Event.FromString(record), content[16 + length :]
            if event.session_log.status == SessionLog.START:
                found = [each for each in found if each[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_has_every_step_once_also_after_a_kill(tmp_path: Path, store: StoreWriter) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (1, 2):
            commit(store, step, reward=step)
            log.write(step, {"reward": step})
    commit(store, 3, reward=3)  # and it is killed
    MetricsLog(tmp_path, 3, board_from=2).close()
    assert scalars(tmp_path) == [(step, "reward", step) for step in (1, 2, 3)]
    MetricsLog(tmp_path, 3, board_from=0).close()
    assert scalars(tmp_path) == [(step, "reward", step) for step in (1, 2, 3)]


def test_tensorboard_gets_the_names_that_it_allows_and_no_infinities(tmp_path: Path, store: StoreWriter) -> None:
    commit(store, 1)
    with MetricsLog(tmp_path) as log:
        log.write(1, {"/rollout/how good?": 0.5, "kl": math.inf})
    assert scalars(tmp_path) == [(1, "rollout/how_good_", 0.5)]


class _FileOfANetwork:
    """Where the quota is exceeded, it refuses what is written, and says so again when it is closed."""

    is_full = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, content: bytes) -> int:
        self._check()
        return self._file.write(content)

    def close(self) -> None:
        self._file.close()
        self._check()

    def _check(self) -> None:
        if self.is_full:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_files_that_cannot_even_be_closed_are_brought_up_to_date_later(
    tmp_path: Path, store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.open

    def of_network(path: Path, *args: Any, **kwargs: Any) -> Any:
        file: Any = plain(path, *args, **kwargs)
        return _FileOfANetwork(file) if kwargs.get("buffering") == 0 else file

    monkeypatch.setattr(Path, "open", of_network)
    with MetricsLog(tmp_path) as log:
        for step in range(1, 5):
            commit(store, step, reward=step)
            monkeypatch.setattr(_FileOfANetwork, "is_full", step in (2, 3))
            log.write(step, {"reward": step})
        monkeypatch.setattr(_FileOfANetwork, "is_full", True)
    assert read_metrics(tmp_path) == [{"step": step, "reward": step} for step in range(1, 5)]
    assert scalars(tmp_path) == [(step, "reward", step) for step in range(1, 5)]


def test_run_that_has_not_begun_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


@pytest.mark.usefixtures("store")
def test_every_episode_is_one_line_of_the_log(tmp_path: Path) -> None:
    message = {"role": "user", "content": "héllo\n"}
    with RolloutLog(tmp_path) as log:
        log.write(2, [(7, make_conversation(message)), (8, make_conversation(message, reward=0.0))])
    first, second = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert first == {
        "step": 2,
        "task_id": 7,
        "reward": 1.0,
        "messages": [message],
        "version_min": 3,
        "version_max": 4,
        "tokens": 3,
        "calls": 2,
        "seconds": 0.3125,
        "turns": [[0.1, 0.25, 3]],
    }
    assert second["task_id"] == 8


@pytest.mark.usefixtures("store")
def test_number_beyond_64_bits_in_a_call_is_logged(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 10**30}}}
    episode = make_conversation({"role": "assistant", "content": "", "tool_calls": [call]})
    with RolloutLog(tmp_path) as log:
        log.write(1, [(7, episode)])
    (row,) = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert row["messages"][0]["tool_calls"] == [call]


def test_episodes_that_a_killed_run_did_not_come_to_write_are_added_once(tmp_path: Path, store: StoreWriter) -> None:
    groups = [GroupResult(number, [make_conversation(), make_conversation()], [], {}) for number in range(3)]
    path = tmp_path / "rollouts.jsonl"
    with RolloutLog(tmp_path) as log:
        for step, group in enumerate(groups, 1):
            commit(store, step, group)
            log.write(step, [(group.task_id, episode) for episode in group.episodes])
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for left in (b"", lines[0], b"".join(lines[:3]), whole[:-7], b"".join([*lines[:2], *lines[4:]])):
        path.write_bytes(left)
        RolloutLog(tmp_path, 3).close()
        assert path.read_bytes() == whole
