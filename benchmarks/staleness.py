"""What becomes of the longest episodes? `rollout.when_stale` wait, drop and train on lognormal waits.

The real admission and pipeline on a virtual clock, between workers that only wait and a trainer that takes a second:
groups of 8 episodes of 3 s on average, 16 groups a step, 64 running, η = 2. A group takes as long as its longest
episode and samples its first token when it starts. For each setting, at two spreads: seconds per step and what they are
spent on, the mean duration of trained groups against that of all that were started, how many of the trained belong to
the longest tenth of these, and the oldest age in versions.
"""

import asyncio
import itertools
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.api.messages import Episode, GroupResult, GroupTask, Row
from areal.config.rollout import WhenStale
from areal.rollout.admission import Admission
from areal.rollout.dispatch import GroupWorker
from areal.rollout.pipeline import Pipeline
from areal.simulation.scenario import run_virtually
from benchmarks.report import Aim, main

MEAN_SECONDS, TRAIN_SECONDS = 3.0, 1.0
BATCH, SAMPLES, RUNNING, ETA = 16, 8, 64, 2
STEPS = 1000
FILLING = 10
"""First steps, in which the pipeline fills: their time is not counted."""
SETTINGS: tuple[WhenStale, ...] = ("wait", "drop", "train")


@dataclass
class Outcome:
    started: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    """Seconds of groups."""
    ages: list[int] = field(default_factory=list)
    dropped: int = 0
    steps: int = 0
    seconds: float = 0.0
    expiring_seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        longest = np.quantile(self.started, 0.9)
        step = self.seconds / self.steps
        expiring = self.expiring_seconds / self.steps
        return {
            "step_seconds": step,
            "training_seconds": TRAIN_SECONDS,
            "waiting_for_the_oldest_seconds": expiring,
            "waiting_for_enough_seconds": step - TRAIN_SECONDS - expiring,
            "bias": float(np.mean(self.trained) / np.mean(self.started) - 1),
            "longest_decile": float(np.mean(np.array(self.trained) > longest)),
            "dropped": self.dropped / (self.dropped + len(self.trained)),
            "mean_age": float(np.mean(self.ages)),
            "max_age": float(max(self.ages)),
        }


class WaitingWorker(GroupWorker):
    """Its groups do nothing but last; all settings of one spread are given the same durations in the same order."""

    def __init__(self, sigma: float, outcome: Outcome) -> None:
        self.version = 0
        self._sigma = sigma
        self._draw = np.random.default_rng(1)
        self._outcome = outcome

    async def run_group(self, task: GroupTask) -> GroupResult:
        location = math.log(MEAN_SECONDS) - self._sigma**2 / 2
        seconds = self._draw.lognormal(location, self._sigma, task.n_samples).tolist()
        row = _row(self.version)
        self._outcome.started.append(max(seconds))
        await asyncio.sleep(max(seconds))
        episodes = [Episode([row], 0.0, seconds=each) for each in seconds]
        return GroupResult(task.task_id, episodes, [], {})


def _row(version: int) -> Row:
    """One token."""
    zero = np.zeros(1, np.float32)
    return Row(
        input_ids=np.zeros(1, np.int32),
        loss_mask=np.ones(1, np.bool_),
        logprobs=zero,
        versions=np.full(1, version, np.int32),
        returns=zero,
        completion_index=np.zeros(1, np.int32),
        temperatures=zero,
        reward=0.0,
    )


async def train(when_stale: WhenStale, sigma: float, steps: int) -> Outcome:
    outcome = Outcome(steps=steps)
    worker = WaitingWorker(sigma, outcome)
    # More than are trained, so that it does not run dry towards the end.
    total = (steps + FILLING + ETA + 1) * BATCH
    admission = Admission(BATCH, ETA, RUNNING, total, when_stale=when_stale)
    tasks = ((number, dict[str, Any]()) for number in itertools.count())
    pipeline = Pipeline([worker], admission, tasks, n_samples=SAMPLES, max_idle_rejections=sys.maxsize)
    clock = asyncio.get_running_loop().time
    began = 0.0
    pipeline.publish(0, "")
    for version in range(steps + FILLING):
        if version == FILLING:
            began = clock()
        groups = await pipeline.take(BATCH)
        outcome.trained += [max(episode.seconds for episode in group.episodes) for group in groups]
        outcome.ages += [version - group.oldest_version for group in groups]
        outcome.expiring_seconds += pipeline.expiring_wait_seconds if version >= FILLING else 0.0
        await asyncio.sleep(TRAIN_SECONDS)
        worker.version = version + 1
        pipeline.publish(version + 1, "")
    outcome.seconds = clock() - began
    outcome.dropped = pipeline.pop_dropped().groups
    await pipeline.aclose()
    return outcome


def run() -> tuple[dict[str, Any], list[Aim]]:
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for sigma in (0.5, 1.0):
        figures[f"sigma_{sigma}"] = {}
        for when_stale in SETTINGS:
            found = run_virtually(train(when_stale, sigma, STEPS)).figures()
            figures[f"sigma_{sigma}"][when_stale] = found
            shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
            print(f"σ = {sigma}, {when_stale}: {shown}", file=sys.stderr)
    aims = []
    for spread, found in figures.items():
        wait = found["wait"]
        aims.append(Aim.at_most(f"{spread}: wait, bias of the mean duration", abs(wait["bias"]), 0.02))
        aims.append(Aim.at_most(f"{spread}: wait, oldest age in versions", wait["max_age"], ETA))
    cost = {spread: found["wait"]["step_seconds"] / found["drop"]["step_seconds"] for spread, found in figures.items()}
    aims.append(Aim.at_most("sigma_0.5: seconds of wait over those of drop", cost["sigma_0.5"], 1.25))
    return {**figures, "wait_over_drop": cost}, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
