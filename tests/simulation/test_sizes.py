"""Ranks, weights on their way, failures and the driver: each piece against its closed form, and what always holds."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.errors import ConfigError
from areal.cli.main import main
from areal.config.parallel import Ranks
from areal.simulation.bottleneck import find_bottleneck
from areal.simulation.failure_costs import failure_costs, saving_advice
from areal.simulation.failures import HOUR, Checkpoints, Failures, best_interval, overhead, young_daly_seconds
from areal.simulation.fanout import FanOut
from areal.simulation.machines import Machines
from areal.simulation.ranks import RankSpeed, deal
from areal.simulation.scenario import DriverSpeed, Prediction, Scenario, predict
from areal.simulation.trace import ClientSpeed, EngineSpeed, Trace, TrainerSpeed, Turn, read_trace

FAST = EngineSpeed(alone_tokens_per_second=1e9, full_tokens_per_second=1e9)
H100 = str(Path(__file__).parents[2] / "examples/simulation/h100-7b.yaml")


def constant(wait: float, step: float) -> Trace:
    """Every episode takes `wait` seconds, every step `step`."""
    return Trace([[Turn(wait, 1)]], FAST, ClientSpeed(), TrainerSpeed(1e9, step))


def test_a_run_without_the_new_parts_is_predicted_as_before_to_the_last_bit() -> None:
    trace = read_trace("lognormal:mean=1,sigma=1,tokens=40,turns=3")
    run = predict(
        Scenario(
            trace,
            engines=3,
            trainers=2,
            workers=2,
            batch_size=4,
            n_samples=3,
            max_concurrent_rollouts=48,
            steps=12,
            when_stale="drop",
        )
    )
    # Of the release before this one.
    assert (run.seconds, run.engine_idle, run.engine_requests) == (
        42.7184094489005,
        0.049428929636006425,
        3.432847896291342,
    )
    assert (run.staleness, run.expired, run.goodput) == ({0: 15, 1: 83, 2: 46}, 21, 1.0)
    turns = [[Turn(0.3, 40), Turn(0.1, 7)], [Turn(2.0, 90)]]
    shared = Trace(turns, EngineSpeed(30, 250, 0.1), ClientSpeed(0.002), TrainerSpeed(2000, 0.1))
    scenario = Scenario(shared, workers=2, batch_size=4, n_samples=4, max_head_offpolicyness=1, steps=10, cores=2)
    run = predict(replace(scenario, when_stale="drop"))
    assert (run.seconds, run.trainer_idle) == (74.52027689837688, 0.9116347888913516)


def test_a_step_of_ranks_is_its_largest_share_and_its_passes() -> None:
    speed = RankSpeed(
        Ranks(4, 2),
        tokens_per_second=100,
        efficiency=0.5,
        pass_tokens=1000,
        pass_bytes=800,
        pass_bytes_per_second=100,
        tensor_bytes_per_token=10,
        tensor_bytes_per_second=1000,
    )
    time = speed.step([2500, 1000, 1000, 1000])
    assert time.computing == pytest.approx(2500 / (2 * 100 * 0.5))
    assert time.passes == 3  # the others add empty ones
    assert time.communicating == pytest.approx(3 * 800 * (3 / 4) / 100 + 2500 * 10 * 2 * (1 / 2) / 1000)
    hidden = replace(speed, overlap=0.5).step([2500, 1000, 1000, 1000])
    assert hidden.communicating == pytest.approx(time.communicating / 2)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_dealing_keeps_every_token_and_is_even_to_one_sequence(sequences: list[float], shares: int) -> None:
    loads = deal(sequences, shares)
    assert sum(loads) == pytest.approx(sum(sequences))
    assert max(loads) - min(loads) <= max(sequences) + 1e-6


def test_a_fetch_takes_as_long_as_its_tightest_limit() -> None:
    alone = FanOut(size_bytes=1000, hosts=16, host_bytes_per_second=100, serve_byte_seconds=0.001)
    assert alone.limits() == {"uplink": 160.0, "serving": 16.0, "downlink": 10.0, "fetching": 0.0}
    ranks = replace(alone, from_ranks=True, sources=64, source_hosts=8, check_byte_seconds=0.002)
    assert ranks.stage_seconds() == pytest.approx(16 * 1000 / (8 * 100) + 2)
    assert ranks.stage_seconds(1) == pytest.approx(10 + 2)
    assert replace(ranks, hosts=0).stage_seconds() == pytest.approx(2)  # the weights are there


@pytest.mark.parametrize("from_ranks", [True, False])
def test_the_training_loop_waits_until_all_engines_have_new_weights(from_ranks: bool) -> None:
    fan_out = FanOut(
        size_bytes=1000,
        hosts=4,
        from_ranks=from_ranks,
        host_bytes_per_second=1000,
        write_byte_seconds=0.001,
        serve_byte_seconds=0.002,
    )
    run = predict(
        Scenario(constant(1, 1), batch_size=2, n_samples=1, steps=10, max_head_offpolicyness=0, fan_out=fan_out)
    )
    # Wait, train, write, serve to four hosts: one after the other.
    assert run.seconds == pytest.approx(10 * (1 + 1 + 1 + 8), rel=1e-4)
    assert run.loop["publishing"] == pytest.approx(9 / 11, rel=1e-3)
    assert run.utilisation["driver"] == pytest.approx(0 if from_ranks else 8 / 11, rel=1e-3)


def test_weights_that_travel_while_training_goes_on_hold_nothing_up() -> None:
    fan_out = FanOut(size_bytes=1000, hosts=1, fetch_byte_seconds=0.0009, from_ranks=True)
    scenario = Scenario(
        constant(0.1, 1), batch_size=2, n_samples=2, steps=40, max_head_offpolicyness=1, fan_out=fan_out
    )
    waits, goes_on = predict(scenario), predict(replace(scenario, fan_out=replace(fan_out, while_training=True)))
    assert waits.step_seconds == pytest.approx(1.9, rel=0.02)
    assert goes_on.step_seconds == pytest.approx(1.0, rel=0.04)  # the last version is waited for
    assert max(waits.staleness) <= 1
    assert max(goes_on.staleness) <= 2


def test_the_driver_receives_while_ranks_work_and_deals_while_they_wait() -> None:
    driver = DriverSpeed(receive_episode_seconds=0.1, deal_episode_seconds=0.05)
    run = predict(Scenario(constant(0.1, 1), batch_size=4, n_samples=2, steps=40, driver=driver))
    # For 0.1 s the driver deals alone; then groups come in, 0.8 s in all, and both go on at half the speed. The first
    # quarter and the end of the run, at which no groups come in, shorten the mean.
    assert run.step_seconds == pytest.approx(0.1 + 2 * 0.3 + 1, rel=0.03)
    assert run.loop["dealing"] == pytest.approx(0.7 / 1.7, rel=0.05)
    assert run.utilisation["driver"] == pytest.approx(8 * 0.15 / 1.7, rel=0.05)
    slow = replace(driver, receive_episode_seconds=0.5)
    run = predict(Scenario(constant(0.1, 1), batch_size=4, n_samples=2, steps=40, driver=slow))
    assert find_bottleneck(Scenario(constant(0.1, 1)), run).part == "driver"


def test_an_engine_that_ends_costs_what_it_had_computed_and_the_answers_go_on() -> None:
    engine = EngineSpeed(10, 1e9, recompute_token_seconds=0.001)
    trace = Trace([[Turn(0, 100)]], engine, ClientSpeed(), TrainerSpeed(1e9, 0))
    failures = Failures(gpu_hours=0.05, engine_restart_seconds=5, seed=1)
    scenario = Scenario(trace, engines=4, batch_size=8, n_samples=2, steps=90, prompt_tokens=50, failures=failures)
    scenario = replace(scenario, checkpoints=Checkpoints(1))
    run, calm = predict(scenario), predict(replace(scenario, failures=Failures()))
    ended = run.losses.counts["engine"]
    assert ended > 10
    assert run.episodes == calm.episodes == 90 * 8 * 2
    assert run.seconds > calm.seconds
    # Down for 5 s each; each of its requests is computed again, prompt and all.
    again = run.losses.tokens_again * engine.recompute_token_seconds
    assert run.losses.gpu_hours["engine"] * HOUR == pytest.approx(ended * 5 + again, rel=0.1)
    assert run.losses.tokens_again > 50


def saving_run(seed: int, interval: int) -> Prediction:
    """Steps of a second; the run fails every 50 s and takes 3 s to come back."""
    scenario = Scenario(constant(0.0, 1), batch_size=1, n_samples=1, steps=1000, max_head_offpolicyness=0)
    failures = Failures(driver_hours=50 / HOUR, run_restart_seconds=3, seed=seed)
    return predict(replace(scenario, failures=failures, checkpoints=Checkpoints(interval, pause_seconds=0.5)))


@pytest.mark.parametrize("interval", [4, 10, 25])
def test_a_failure_of_the_run_costs_half_an_interval_and_the_restart(interval: int) -> None:
    runs = [saving_run(seed, interval) for seed in range(8)]
    ended = sum(run.losses.counts["run"] for run in runs)
    lost = sum(run.losses.gpu_hours["run"] for run in runs) * HOUR / 2  # an engine and a trainer
    # Shorter than half: a failure comes early in an interval rather than late.
    expected = (interval + 0.5) / 2 + 3
    assert lost / ended == pytest.approx(expected, rel=0.15)
    seconds = sum(run.seconds for run in runs)
    assert 1 - 8 * 1000 / seconds == pytest.approx(overhead(interval, 0.5, 3, 50), rel=0.1)
    assert all(run.episodes == 1000 and run.losses.steps_again > 0 for run in runs)


def test_the_best_interval_is_young_and_dalys_where_saving_is_cheap() -> None:
    best = best_interval(1.0, Checkpoints(pause_seconds=2), 60, between_failures=10_000)
    assert best.seconds == pytest.approx(young_daly_seconds(2, 10_000), rel=0.02)
    assert best.overhead < overhead(best.seconds * 2, 2, 60, 10_000)
    assert best.overhead < overhead(best.seconds / 2, 2, 60, 10_000)
    slow_disk = best_interval(1.0, Checkpoints(pause_seconds=2, write_seconds=700), 60, between_failures=10_000)
    assert slow_disk.steps == 698


def test_a_run_that_fails_more_often_than_it_saves_is_refused() -> None:
    failures = Failures(driver_hours=2 / HOUR)
    with pytest.raises(ConfigError, match="must fail less often than it saves"):
        predict(Scenario(constant(0, 1), batch_size=1, n_samples=1, steps=100, failures=failures))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    eta=st.integers(0, 3),
    workers=st.integers(1, 3),
    hosts=st.integers(0, 2),
    data=st.integers(1, 3),
    saves=st.integers(1, 3),
    while_training=st.booleans(),
)
def test_whatever_fails_every_step_is_trained_once_and_nothing_is_overused(
    seed: int, eta: int, workers: int, hosts: int, data: int, saves: int, while_training: bool
) -> None:
    trace = Trace([[Turn(0.5, 20), Turn(0.2, 8)], [Turn(1.5, 30)]], EngineSpeed(20, 60, 0.1, 0.001), ClientSpeed(0.01))
    fan_out = FanOut(
        size_bytes=100,
        hosts=hosts,
        from_ranks=bool(seed % 2),
        host_bytes_per_second=100,
        serve_byte_seconds=0.002,
        fetch_byte_seconds=0.003,
        while_training=while_training,
    )
    run = predict(
        Scenario(
            trace,
            engines=4,
            engines_per_host=2,
            workers=workers,
            batch_size=3,
            n_samples=2,
            max_head_offpolicyness=eta,
            max_concurrent_rollouts=24,
            steps=8,
            ranks=RankSpeed(Ranks(data, 1), 100, pass_bytes=20, pass_bytes_per_second=100),
            fan_out=fan_out,
            driver=DriverSpeed(0.01, 0.0001, 0.01, 0.0001),
            checkpoints=Checkpoints(saves, 0.1, 0.5),
            failures=Failures(0.05, 0.05, 0.02, 0.02, 2, 1, 3, seed),
        )
    )
    assert run.episodes == 8 * 3 * 2
    assert max(run.staleness) <= eta + while_training
    assert all(-1e-9 <= used <= 1 + 1e-9 for used in run.utilisation.values())
    assert sum(run.loop.values()) == pytest.approx(1, abs=0.01)
    assert run.goodput <= 1


def test_speeds_follow_from_the_file() -> None:
    machines = Machines.read(H100, ["gpu.training_mfu=0.5", "weights.from_ranks=false"])
    assert machines.rank_speed(Ranks(8, 1)).tokens_per_second == pytest.approx(989e12 * 0.5 / (10 * 7.6e9))
    assert machines.engine.alone_tokens_per_second == pytest.approx(3.35e12 * 0.7 / 15.2e9)
    assert machines.fewest_ranks == 2
    scenario = machines.scenario(read_trace("lognormal:"), 16, Ranks(16, 1))
    assert (scenario.gpus, scenario.fan_out.hosts, scenario.fan_out.sources) == (32, 2, 1)
    assert machines.scenario(read_trace("lognormal:"), 4, Ranks(4, 1)).fan_out.hosts == 0


@pytest.mark.parametrize("gpus", [8, 64, 1000])
def test_a_plan_uses_all_gpus_and_puts_ranks_on_hosts_of_their_own(gpus: int) -> None:
    scenario = Machines.read(H100).plan(
        read_trace("lognormal:mean=5,tokens=3000"), gpus, batch_size=64, n_samples=8, eta=2, steps=1
    )
    assert scenario.gpus == gpus
    assert gpus == 8 or scenario.trainer_gpus % 8 == 0


def test_failure_costs_grow_with_the_size() -> None:
    machines, trace = Machines.read(H100), read_trace("lognormal:mean=5,tokens=3000")
    costs = []
    for gpus in (8, 64):
        scenario = machines.plan(trace, gpus, batch_size=16, n_samples=4, eta=2, steps=4)
        run = predict(scenario)
        of_run = failure_costs(scenario, run)[-1]
        assert of_run.kind == "rank or driver"
        costs.append(of_run)
        assert saving_advice(scenario, run.step_seconds) is not None
        assert failure_costs(replace(scenario, failures=Failures()), run) == []
    assert costs[1].per_day > costs[0].per_day
    assert costs[1].gpu_hours > costs[0].gpu_hours


def test_the_verb_compares_sizes_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["simulate", "--machines", H100, "--latency", "lognormal:mean=5,tokens=500,spread=0.5", "--gpus", "8", "16"]
    words += ["--batch-size", "4", "--n-samples", "2", "--steps", "4", "--compare", "weights.bytes_per_parameter=1"]
    picture = tmp_path / "sizes.png"
    assert main([*words, "--json", "--plot", str(picture)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["settings"]["gpus"] for run in runs] == [8, 16, 8, 16]
    assert runs[1]["fan_out_seconds"]["stage"] == pytest.approx(2 * runs[3]["fan_out_seconds"]["stage"])
    assert picture.stat().st_size > 1000
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "saturated" in printed
    assert "what failures cost" in printed


def test_the_verb_takes_a_division_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"simulate --machines {H100} --latency lognormal: --engines 8 --ranks fsdp:d4t2 --steps 2 --eta 1 --json"
    assert main([*words.split(), "--set", "gpu.training_mfu=0.3"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["settings"]["ranks"], run["settings"]["gpus"]) == ("fsdp:d4t2", 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8", "are about --machines FILE"),
        (f"--machines {H100}", "needs --ranks fsdp:dN, or --gpus N"),
        (f"--machines {H100} --gpus 2", "needs 2 GPUs, and an engine 1 more, got 2"),
        (f"--machines {H100} --gpus 8 --set gpu.mfu=1", "gpu has no 'mfu'"),
        (f"--machines {H100} --gpus 8 --set speed=1", "a change must be section.name=value, got 'speed=1'"),
        (f"--machines {H100} --gpus 8 --set weights.from_ranks=3", "from_ranks must be true or false, got 3"),
        (f"--machines {H100} --gpus 8 --set disk.speed=1", "has no use for disk"),
    ],
)
def test_wrong_machines_are_refused_with_the_reason(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--latency", "lognormal:", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_never_is_infinite() -> None:
    assert Failures().run_seconds(1000, 100) == math.inf
    assert not Failures().possible
