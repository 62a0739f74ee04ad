"""How often parts of a run fail, what that costs, and how often to save.

Failures are independent and come after exponential times, so it makes no difference how long a part has run. When a
rank or the driver ends, the run goes on from its newest checkpoint: what was trained since is lost, which is half of
the time between two checkpoints on average.

How often to save follows from Daly's exact expectation. With failures every M seconds, a segment of T seconds and a
checkpoint of δ, and R seconds to start again, the segment takes (M + R)(e^((T + δ) / M) - 1) seconds. The well-known
√(2 δ M) of Young and Daly is the best T where δ is much smaller than M.
"""

import math
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """Mean hours between failures of one part (inf = it never fails), and the seconds until it works again."""

    gpu_hours: float = math.inf
    """Of each GPU, with the process on it: of an engine, or a rank."""
    host_hours: float = math.inf
    """Of each host, with everything on it."""
    worker_hours: float = math.inf
    """Of each rollout worker."""
    driver_hours: float = math.inf
    engine_restart_seconds: float = 0.0
    """Until an engine has loaded and is ready for the weights of the day."""
    worker_restart_seconds: float = 0.0
    run_restart_seconds: float = 0.0
    """Until all processes of the run are back after the end of a rank or the driver, engines included."""
    seed: int = 0

    @property
    def possible(self) -> bool:
        return min(self.gpu_hours, self.host_hours, self.worker_hours, self.driver_hours) < math.inf

    def run_seconds(self, rank_gpus: int, rank_hosts: int) -> float:
        """Mean time between failures that end all ranks."""
        rate = rank_gpus / self.gpu_hours + rank_hosts / self.host_hours + 1 / self.driver_hours
        return HOUR / rate if rate else math.inf


@dataclass(frozen=True)
class Checkpoints:
    steps: int | None = None
    """`saver.freq_steps`; None = none is written, and a run begins again."""
    pause_seconds: float = 0.0
    """For which the trainer waits: copies are taken."""
    write_seconds: float = 0.0
    """Until it is whole, while training goes on. The next one waits for it."""


@dataclass(frozen=True)
class Interval:
    """Between two checkpoints."""

    steps: int
    seconds: float
    overhead: float
    """Expected share of the time that is spent on checkpoints, lost steps and restarts."""


def overhead(seconds: float, pause_seconds: float, restart_seconds: float, between_failures: float) -> float:
    """Expected share of the time that is not spent on steps, if one saves after every `seconds` of them."""
    exponent = min(700.0, (seconds + pause_seconds) / between_failures)  # e^710 is no float any more
    return 1 - seconds / ((between_failures + restart_seconds) * math.expm1(exponent))


def best_interval(
    step_seconds: float, checkpoints: Checkpoints, restart_seconds: float, between_failures: float
) -> Interval:
    """In whole steps, and no shorter than it takes to write one."""
    least = max(1, math.ceil((checkpoints.write_seconds - checkpoints.pause_seconds) / step_seconds))

    def of(steps: int) -> Interval:
        seconds = steps * step_seconds
        return Interval(steps, seconds, overhead(seconds, checkpoints.pause_seconds, restart_seconds, between_failures))

    best, candidate = of(least), least
    while (following := of(candidate := candidate + max(1, candidate // 64))).overhead <= best.overhead:
        best = following
    return best


def young_daly_seconds(pause_seconds: float, between_failures: float) -> float:
    return math.sqrt(2 * pause_seconds * between_failures)
