"""Simulated runs whose outcome can be worked out by hand, and the bounds that hold for all of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.errors import TraceError
from areal.cli.main import main
from areal.simulation.scenario import Scenario, predict
from areal.simulation.trace import ClientSpeed, EngineSpeed, Trace, TrainerSpeed, Turn, read_trace

FAST = EngineSpeed(alone_tokens_per_second=1e9, full_tokens_per_second=1e9)


def constant(wait: float, step: float) -> Trace:
    """Every episode takes `wait` seconds, every step `step`."""
    return Trace([[Turn(wait, 1)]], FAST, ClientSpeed(), TrainerSpeed(1e9, step))


def test_a_synchronous_run_alternates() -> None:
    run = predict(Scenario(constant(3, 1), batch_size=2, n_samples=2, max_head_offpolicyness=0, steps=10))
    assert run.seconds == pytest.approx(10 * (3 + 1), rel=1e-4)
    assert run.trainer_idle == pytest.approx(0.75, rel=1e-3)
    assert run.staleness == {0: 40}


def test_with_staleness_the_slower_side_decides() -> None:
    run = predict(Scenario(constant(3, 1), batch_size=2, n_samples=2, max_head_offpolicyness=4, steps=100))
    # Five batches are in flight for each 3 s: the trainer's second per step is all that is left.
    assert run.seconds == pytest.approx(100, rel=0.05)
    assert run.trainer_idle < 0.05


def test_client_time_is_paid_by_the_worker_processes() -> None:
    trace = Trace([[Turn(0, 1)]], FAST, ClientSpeed(call_seconds=0.1), TrainerSpeed(1e9, 0))
    seconds = [
        predict(Scenario(trace, batch_size=4, n_samples=4, workers=workers, steps=5)).seconds for workers in (1, 2)
    ]
    assert seconds == pytest.approx([8.0, 4.0], rel=0.05)


@settings(max_examples=30, deadline=None)
@given(
    waits=st.lists(st.floats(0, 3), min_size=1, max_size=8),
    eta=st.integers(0, 4),
    batch=st.integers(1, 4),
    samples=st.integers(1, 3),
)
def test_nothing_trained_is_staler_than_allowed(waits: list[float], eta: int, batch: int, samples: int) -> None:
    trace = Trace([[Turn(wait, 5), Turn(wait, 3)] for wait in waits], EngineSpeed(10, 20, 0.1))
    run = predict(Scenario(trace, batch_size=batch, n_samples=samples, max_head_offpolicyness=eta, steps=6))
    assert max(run.staleness) <= eta
    assert run.episodes == 6 * batch * samples
    assert 0 <= run.engine_idle <= 1
    assert 0 <= run.trainer_idle <= 1


def test_a_trace_survives_the_file(tmp_path: Path) -> None:
    trace = constant(0.5, 0.25)
    trace.save(tmp_path / "trace.json")
    assert read_trace(str(tmp_path / "trace.json")) == trace


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must be an object with"),
        ({"episodes": [[]]}, "at least one turn"),
        ({"episodes": [[{"wait_seconds": -1, "tokens": 1}]]}, "wait_seconds must be a number >= 0, got -1"),
        ({"episodes": [[{"tokens": 1}]]}, "needs wait_seconds, tokens"),
        ({"episodes": [[{"wait_seconds": 1, "tokens": 1}]], "engine": {"speed": 3}}, "no 'speed'"),
        ({"episodes": [[{"wait_seconds": 1, "tokens": 1}]], "gpu": {}}, "no use for gpu"),
        (
            {"episodes": [[{"wait_seconds": 1, "tokens": 1}]], "engine": {"full_tokens_per_second": 0}},
            "must be > 0, got 0",
        ),
    ],
)
def test_a_wrong_trace_is_refused_with_the_reason(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TraceError, match=message):
        read_trace(str(path))


def test_the_verb_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --latency lognormal:mean=1,sigma=0.5 --steps 3 --batch-size 2 --eta 0 2 --json"
    assert main(words.split()) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["eta_2"]["seconds"] < predicted["eta_0"]["seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lognormal: --engines 0", "--engines must be >= 1, got 0"),
        ("lognormal:mean=nan", "needs mean > 0"),
        ("lognormal:sigma=inf", "sigma >= 0"),
        ("lognormal: --save nowhere/trace.json", "there is no directory 'nowhere'"),
        ("lognormal: --plot nowhere/plot.png", "there is no directory 'nowhere'"),
    ],
)
def test_the_verb_refuses_what_means_nothing(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--latency", *words.split()]) == 2
    assert message in capsys.readouterr().err
