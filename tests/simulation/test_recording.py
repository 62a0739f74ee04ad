"""A trace from a run's own files."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal.api.errors import TraceError
from areal.simulation.trace import Turn, record


def write_run(place: Path, turns: list[list[Any]], generating_seconds: float) -> Path:
    lines = [{"turns": each} for each in turns]
    step = {"step": 1, "step_seconds": 3.0, "wait_seconds": 1.0, "tokens": 100.0}
    summary = {
        "calls": sum(map(len, turns)),
        "cpu_seconds": {"driver": 9.0, "engine": 9.0, "rollout worker 0": 1.0, "rollout worker 1": 2.0},
        "generating_seconds": generating_seconds,
    }
    (place / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "metrics.jsonl").write_text('{"step": 0, "eval_reward": 0.5}\n' + json.dumps(step) + "\n")
    (place / "summary.json").write_text(json.dumps(summary))
    return place


def test_waits_lie_between_an_answer_and_the_next_question(tmp_path: Path) -> None:
    trace = record(write_run(tmp_path, [[(0.5, 1.5, 10), (2.0, 3.0, 20)], [(0.0, 1.0, 10)]], 2.0))
    assert trace.episodes == [[Turn(0.5, 10), Turn(0.5, 20)], [Turn(0.0, 10)]]


def test_calls_at_the_same_time_wait_for_nothing_in_between(tmp_path: Path) -> None:
    trace = record(write_run(tmp_path, [[(1.0, 3.0, 10), (1.5, 2.0, 10), (4.0, 5.0, 10)]], 2.0))
    assert [turn.wait_seconds for turn in trace.episodes[0]] == [1.0, 0.0, 1.0]


def test_speeds_are_those_of_the_run(tmp_path: Path) -> None:
    # A lone call takes 0.11 s a token; half of the others have four requests at a time: 0.14 s.
    alone = [[(0.0, 1.1, 10)] for _ in range(10)]
    crowded = [[(0.0, 1.4, 10)] for _ in range(10)]
    trace = record(write_run(tmp_path, [*alone, *crowded], generating_seconds=25 / 2.5))
    assert trace.engine.alone_tokens_per_second == pytest.approx(10.0)
    assert trace.engine.full_tokens_per_second == pytest.approx(100.0)
    assert trace.client.call_seconds == pytest.approx(3.0 / 20)
    assert trace.trainer.tokens_per_second == pytest.approx(50.0)


@pytest.mark.parametrize("name", ["rollouts.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("line", [b'{"turns": [[0.5, 1', b"\xff\xfe", b"[]", b""])
def test_damaged_line_is_named_with_its_file(tmp_path: Path, name: str, line: bytes) -> None:
    file = write_run(tmp_path, [[(0.5, 1.5, 10)]], 2.0) / name
    whole = file.read_bytes()
    file.write_bytes(whole + line + b"\n")
    with pytest.raises(TraceError, match=f"line {len(whole.splitlines()) + 1} of .*{name} must be a JSON object"):
        record(tmp_path)


SUMMARY = {"calls": 1, "cpu_seconds": {"rollout worker 0": 1.0}, "generating_seconds": 2.0}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "must be a JSON object with generating_seconds, calls, cpu_seconds, and is damaged; take another run"),
        (b'{"calls": 1', "must be a JSON object"),
        (b"\xff\xfe", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"{}", "must be a JSON object"),
        ({"cpu_seconds": 3}, "must be a JSON object"),
        ({"calls": None}, "calls must be a number >= 0, got None"),
        ({"generating_seconds": 0}, "generating_seconds must be > 0, got 0"),
        ({"generating_seconds": "2"}, "generating_seconds must be a number >= 0, got '2'"),
        ({"generating_seconds": float("nan")}, "generating_seconds must be a number >= 0, got nan"),
        ({"generating_seconds": 10**400}, "generating_seconds must be a number >= 0, got 1000"),
        ({"cpu_seconds": {"rollout worker 0": True}}, "rollout worker 0 must be a number >= 0, got True"),
    ],
)
def test_damaged_summary_is_named(tmp_path: Path, content: bytes | dict[str, Any], complaint: str) -> None:
    damaged = content if isinstance(content, bytes) else json.dumps(SUMMARY | content).encode()
    (write_run(tmp_path, [[(0.5, 1.5, 10)]], 2.0) / "summary.json").write_bytes(damaged)
    with pytest.raises(TraceError, match=rf"summary\.json.*{complaint}"):
        record(tmp_path)


@pytest.mark.parametrize(
    "turns", [{}, [[0.5, 1.5]], [[0.5, "1.5", 10]], [[1.5, 0.5, 10]], [None], "text", [[0, 1, -1]]]
)
def test_calls_that_cannot_have_been_are_named_with_their_line(tmp_path: Path, turns: Any) -> None:
    with pytest.raises(TraceError, match=r"line 2 of .*rollouts.jsonl: turns must be a list of \[asked, answered"):
        record(write_run(tmp_path, [[(0.5, 1.5, 10)], turns], 2.0))


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (
            {"step_seconds": 3.0, "wait_seconds": 1.0},
            "line 3 of .*metrics.jsonl: tokens must be a number >= 0, got None",
        ),
        ({"step_seconds": None, "wait_seconds": 1.0, "tokens": 1}, "step_seconds must be a number >= 0, got None"),
    ],
)
def test_steps_that_lack_a_figure_are_named_with_their_line(tmp_path: Path, step: Any, complaint: str) -> None:
    with (write_run(tmp_path, [[(0.5, 1.5, 10)]], 2.0) / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step) + "\n")
    with pytest.raises(TraceError, match=complaint):
        record(tmp_path)


def test_run_without_tokens_or_time_has_nothing_to_simulate(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="recorded no call"):
        record(write_run(tmp_path, [[(0.5, 1.5, 0)]], 2.0))
    metrics = write_run(tmp_path, [[(0.5, 1.5, 10)]], 2.0) / "metrics.jsonl"
    metrics.write_text(json.dumps({"step_seconds": 1.0, "wait_seconds": 1.0, "tokens": 5}) + "\n")
    with pytest.raises(TraceError, match="recorded no call of the model, or no step"):
        record(tmp_path)


def test_directory_that_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not the directory of a finished run"):
        record(tmp_path)
    with pytest.raises(TraceError, match="recorded no call"):
        record(write_run(tmp_path, [], 1.0))
