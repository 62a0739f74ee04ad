"""metrics.jsonl, TensorBoard and rollouts.jsonl: readable at once, continued by a resumed run without repetition."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_runs import make_conversation

from areal.trainer.logs import MetricsLog, RolloutLog, read_metrics


def test_each_step_is_one_json_line_that_is_readable_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "run") as log:
        log.write(0, {"reward": 0.5, "loss": np.float32(0.25)})
        assert read_metrics(tmp_path / "run") == [{"step": 0, "reward": 0.5, "loss": 0.25}]
        log.write(1, {"step": 1, "reward": 0.75})
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_value_that_json_cannot_say_becomes_null(tmp_path: Path, value: float | None) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"reward": value})
    assert read_metrics(tmp_path) == [{"step": 0, "reward": None}]


def test_resumed_run_drops_the_rows_it_will_write_again(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(5):
            log.write(step, {"reward": step})
    with MetricsLog(tmp_path, start_step=3) as log:
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
        log.write(3, {"reward": 30})
    assert [row["reward"] for row in read_metrics(tmp_path)] == [0, 1, 2, 30]
    assert not list(tmp_path.glob("*.tmp"))


def test_half_written_last_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"reward": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]
    with MetricsLog(tmp_path, start_step=1) as log:
        log.write(1, {"reward": 2})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]


def test_tensorboard_events_are_written_too(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"reward": 0.5})
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert b"reward" in events.read_bytes()


def test_run_that_has_not_begun_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_every_episode_is_one_line_of_the_log(tmp_path: Path) -> None:
    message = {"role": "user", "content": "héllo\n"}
    with RolloutLog(tmp_path) as log:
        log.append(2, 7, make_conversation(message))
        log.append(2, 8, make_conversation(message, reward=0.0))
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


def test_number_beyond_64_bits_in_a_call_is_logged(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 10**30}}}
    episode = make_conversation({"role": "assistant", "content": "", "tool_calls": [call]})
    with RolloutLog(tmp_path) as log:
        log.append(1, 7, episode)
    (row,) = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert row["messages"][0]["tool_calls"] == [call]


def test_resumed_run_does_not_repeat_episodes(tmp_path: Path) -> None:
    with RolloutLog(tmp_path) as log:
        for step in range(3):
            log.append(step, step, make_conversation())
    with RolloutLog(tmp_path, start_step=2) as log:
        log.append(2, 9, make_conversation())
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["task_id"]) for row in rows] == [(0, 0), (1, 1), (2, 9)]
