"""Models side by side on the same tasks: `areal eval`.

Each model is served by a fleet of its own, one after the other, as held-out tasks are evaluated in training: the same
engine, rollout workers, deadlines and rejections. What a task samples follows from the seed and its place, so every
model gets the same draws, and models are compared task by task.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from areal.api.errors import ConfigError, NothingAccepted
from areal.api.messages import GroupResult, Rejection
from areal.config.experiment import PPOConfig
from areal.config.training import ActorConfig
from areal.engine.models import find_model, tokenizer_files
from areal.rollout.admission import Admission
from areal.rollout.loading import WorkflowSpec
from areal.rollout.pipeline import NoRecord
from areal.trainer.display import Announcer
from areal.trainer.engines import on_this_machine
from areal.trainer.evaluation import Difference, Evaluation, by_task
from areal.trainer.fleet import Fleet
from areal.utils.threads import plan_threads


@dataclass(frozen=True)
class Contest:
    """What models are measured on."""

    config: PPOConfig
    """Sampling, deadlines and where things run; its model counts for nothing."""
    workflow: WorkflowSpec
    tasks: list[dict[str, Any]]
    samples: int = 1
    """Episodes of each task."""
    greedy: bool = False
    """The likeliest token each time; then one sample is enough."""

    @property
    def episodes(self) -> int:
        """Of each model."""
        return len(self.tasks) * self.samples


@dataclass(frozen=True)
class Measured:
    """What is known of one model."""

    model: str
    evaluation: Evaluation
    seconds: float
    """Of its episodes, without the start of the engine."""
    rejections: dict[str, int]
    """By reason."""
    difference: Difference | None = None
    """To the first model; None = it is that, or the two cannot be paired."""

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            **asdict(self.evaluation),
            "rejections": self.rejections,
            "seconds": self.seconds,
            "difference": asdict(self.difference) if self.difference else None,
        }


def measure(
    contest: Contest, models: Sequence[str], on_model: Callable[[str], None], on_episode: Callable[[], None]
) -> list[Measured]:
    """All models, in order; `on_model` is told when the engine of one is started, `on_episode`, in another thread, when
    an episode of it has ended.

    Raises NothingAccepted if a model has no episode that counts: then there is nothing to measure.
    """
    if contest.config.rollout.agent.mode == "online":
        raise ConfigError("rollout.agent.mode=online is for agents outside, which nobody asks here; use inline")
    with Announcer() as report:
        directories = [find_model(model, report) for model in models]
    measured: list[Measured] = []
    for model, directory in zip(models, directories, strict=True):
        on_model(model)
        found = _measure_one(contest, model, directory, on_episode)
        first = measured[0].evaluation if measured else None
        difference = Difference.of(first, found.evaluation) if first is not None else None
        measured.append(replace(found, difference=difference))
    return measured


def _measure_one(contest: Contest, model: str, directory: Path, on_episode: Callable[[], None]) -> Measured:
    config = _without_trainer(contest.config, directory)
    own = contest.config.tokenizer_path in ("", contest.config.actor.path)
    tokenizer = tokenizer_files(directory) if own else find_model(contest.config.tokenizer_path)
    threads = plan_threads(0, config.scheduler.threads).engine
    spec = contest.workflow
    with (
        TemporaryDirectory(prefix="areal-eval-") as logs,
        Fleet(config, directory, tokenizer, spec, spec, logs=Path(logs), engine_threads=threads) as fleet,
    ):
        nothing = Admission(batch_size=1, max_staleness=0, max_running=1, total_groups=0)
        fleet.begin(iter(()), nothing, None, NoRecord(), ())  # no weights are published, so nothing is trained on
        began = time.monotonic()
        tasks = contest.tasks * contest.samples
        results = fleet.evaluate(tasks, greedy=contest.greedy, on_result=lambda result: on_episode())
        seconds = time.monotonic() - began
    rejections = [rejection for result in results for rejection in result.rejections]
    _require_some(model, results, rejections)
    evaluation = Evaluation.of(by_task(results, len(contest.tasks)))
    return Measured(model, evaluation, seconds, dict(Counter(str(each.reason) for each in rejections)))


def _without_trainer(config: PPOConfig, directory: Path) -> PPOConfig:
    """Nothing is trained, so nothing is set aside for it and none of its settings can be at odds with others."""
    actor = ActorConfig(path=str(directory), group_baseline="none")
    rollout = replace(config.rollout, when_stale="wait")
    if config.scheduler.type == "local":  # else the engine's machine is another
        rollout = on_this_machine(rollout)
    return replace(config, actor=actor, rollout=rollout, critic=type(config.critic)(), ref=type(config.ref)())


def _require_some(model: str, results: Sequence[GroupResult], rejections: Sequence[Rejection]) -> None:
    if any(result.episodes for result in results):
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(r.reason for r in rejections).most_common())
    raise NothingAccepted(
        f"all {len(rejections)} episodes of {model} were rejected ({reasons}), so there is nothing to measure; the "
        f"latest: {rejections[-1].detail}"
    )
