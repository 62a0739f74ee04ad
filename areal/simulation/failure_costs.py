"""What failures cost at a given size, as expected values.

A simulated run lasts minutes and failures are days apart, so most runs meet none. What one costs follows from the run
itself: the GPUs that are without work until something is back, and the work that is done once more.
"""

import math
from dataclasses import dataclass

from areal.simulation.failures import HOUR, Interval, best_interval, overhead, young_daly_seconds
from areal.simulation.scenario import Prediction, Scenario


@dataclass(frozen=True)
class FailureCost:
    kind: str
    per_day: float
    gpu_hours: float
    """Of one."""
    share: float
    """Of all GPU-hours, lost to this kind."""


def failure_costs(scenario: Scenario, run: Prediction) -> list[FailureCost]:
    """Of the kinds that can happen."""
    s, failures, engine = scenario, scenario.failures, scenario.trace.engine
    half_episode = run.tokens / run.episodes / 2
    again = run.engine_requests * (s.prompt_tokens + half_episode) * engine.recompute_token_seconds
    back = failures.engine_restart_seconds + engine.swap_seconds
    running = run.utilisation["episodes at once"] * s.max_running * s.n_samples / s.workers
    publishing = s.fan_out.write_seconds + s.fan_out.stage_seconds() + engine.swap_seconds
    run_back = lost_seconds(scenario, run.step_seconds) + failures.run_restart_seconds + publishing
    fetch = s.fan_out.stage_seconds(min(1, s.fan_out.hosts))
    gpu_seconds = {
        "engine": s.gpus_per_engine * (back + s.fan_out.check_seconds + again),
        "engine host": s.gpus_per_engine * s.engines_per_host * (back + fetch + again),
        "rollout worker": s.gpus_per_engine * running * half_episode / engine.full_tokens_per_second,
        "rank or driver": s.gpus * run_back,
    }
    per_hour = {
        "engine": s.engines * s.gpus_per_engine / failures.gpu_hours,
        "engine host": s.engine_hosts / failures.host_hours,
        "rollout worker": s.workers / failures.worker_hours,
        "rank or driver": HOUR / failures.run_seconds(s.trainer_gpus, s.rank_hosts),
    }
    return [
        FailureCost(kind, 24 * rate, gpu_seconds[kind] / HOUR, rate * gpu_seconds[kind] / HOUR / s.gpus)
        for kind, rate in per_hour.items()
        if rate
    ]


def lost_seconds(scenario: Scenario, step_seconds: float) -> float:
    """Of training, that the end of a rank costs on average: half an interval, and what was not on disk yet."""
    steps, saving = scenario.checkpoints.steps, scenario.checkpoints
    if steps is None:
        return scenario.steps * step_seconds / 2
    return (steps * step_seconds + saving.pause_seconds) / 2 + saving.write_seconds


@dataclass(frozen=True)
class SavingAdvice:
    best: Interval
    present_overhead: float
    """Expected share of the time that checkpoints, lost steps and restarts take with the present interval."""
    young_daly_seconds: float


def saving_advice(scenario: Scenario, step_seconds: float) -> SavingAdvice | None:
    """How often to save; None if ranks never fail."""
    s, failures = scenario, scenario.failures
    between = failures.run_seconds(s.trainer_gpus, s.rank_hosts)
    if between == math.inf:
        return None
    pause, restart = s.checkpoints.pause_seconds, failures.run_restart_seconds
    present = (s.checkpoints.steps or s.steps) * step_seconds
    return SavingAdvice(
        best_interval(step_seconds, s.checkpoints, restart, between),
        overhead(present, pause, restart, between),
        young_daly_seconds(pause, between),
    )
