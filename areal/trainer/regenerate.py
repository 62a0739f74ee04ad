"""Sample a synchronous run again from its start, and compare the weights step by step: `areal replay RUN --regenerate`.

Where generation and training take turns (`rollout.max_head_offpolicyness: 0`), everything follows from the seed: which
tasks a step has, which tokens are drawn, what is learnt from them. The run is trained again in a directory of its own
until it has taken the steps that were taken, or the first that differs. Log-probs of the engine are not compared: their
last bits depend on what else is computed at that moment, which is why bits of weights are the same only where the
trainer computes its own (`actor.recompute_logprob: true`).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from areal.api.errors import ArealError, ConfigError
from areal.config.backend import Backend
from areal.config.experiment import DatasetConfig, PPOConfig
from areal.config.loader import build
from areal.config.training import MetricsConfig, SaverConfig, StoreConfig, ViewerConfig
from areal.dataset import get_custom_dataset
from areal.rollout.loading import WorkflowSpec, check
from areal.store.checks import differing_fields
from areal.store.reader import GROUPS, Altered, GroupChecks, StoredStep, StoreReader
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter
from areal.trainer.machine import DECISIVE_IN_SAMPLING, differences, machine_facts
from areal.trainer.ppo import PPOTraining
from areal.trainer.replay import (
    Figure,
    ReplayOutcome,
    ReplaySpan,
    Taken,
    settings_changed_after,
    step_metrics,
    stored_config,
)

UNCOMPARED = ("logprobs",)
COMPARED_FIGURES = ("reward", "tokens", "loss", "grad_norm")
"""Of a step; most others are times."""
TRIAL = "regenerated"


def regenerate(run: Path, directory: Path, goes_on: Callable[[Taken], bool]) -> ReplayOutcome:
    """Train it again in `directory`, while `goes_on` says so of each step. Raises ArealError if it cannot be sampled
    again."""
    with StoreReader(run, at_rest=True) as store:
        values, sampled_by = stored_config(store), store.meta().get("sampled_by", {})
        changed = settings_changed_after(store.sessions())
        if reason := f"its settings were others up to step {changed}" if changed else refusal(values, sampled_by):
            raise ArealError(
                f"{run} cannot be sampled again: {reason}; without --regenerate it is replayed from its store"
            )
        last = max((each.step for each in store.steps()), default=0)
        if not last:
            raise ArealError(f"the run {run} has not taken a step yet; there is nothing to compare with")
        machine: Mapping[str, Any] = store.sessions()[0]["machine"]
        config = _config(values, directory, store.meta()["total_steps"], machine.get("threads"))
        outcome = ReplayOutcome(run, ReplaySpan(0, last, None))

        def compared(step: int) -> None:
            with StoreReader(directory / config.experiment_name / TRIAL) as again:
                here: Mapping[str, Any] = again.sessions()[0]["machine"]
                taken = _compare(store, again, step, _reasons(config, machine, here))
            outcome.add(taken)
            if step == last or not goes_on(taken):
                raise _Enough

        workflow = WorkflowSpec(sampled_by["workflow"], sampled_by["kwargs"])
        check(workflow, config.reward_fn)
        with _Regeneration(config, compared) as trainer:
            try:
                trainer.train(workflow, workflow)
            except _Enough:
                return outcome
    raise AssertionError("the last step ends it")


def refusal(values: Mapping[str, Any], sampled_by: Mapping[str, Any]) -> str:
    """Why a run with these settings cannot be sampled again; empty if it can."""
    rollout, scheduler = values["rollout"], values["scheduler"]
    engine = Backend.parse(rollout["backend"]).kind
    if eta := rollout["max_head_offpolicyness"]:
        return f"with rollout.max_head_offpolicyness={eta} what it drew depended on when new weights arrived"
    if engine != "embedded" or rollout["addresses"]:
        return f"its answers came from an engine ({engine}) that does not draw them by our seeds alone"
    if rollout["agent"]["mode"] == "online":
        return "its agents were outside (rollout.agent.mode=online)"
    if scheduler["type"] != "local":
        return f"it ran on other hosts (scheduler.type={scheduler['type']})"
    if not sampled_by:
        return "its store does not say which workflow it had"
    if sampled_by["train_dataset"] != "config":
        return "its tasks were given to the trainer as an object; name them in train_dataset.path"
    if sampled_by["filter"]:
        return f"its groups were chosen by a function (dynamic_filter_fn: {sampled_by['filter']})"
    if sampled_by["workflow"] is None:
        return f"its workflow, {sampled_by['name']}, was an object or is defined in a script; give its import string"
    if sampled_by["kwargs"] is None:
        return f"the arguments of its workflow, {sampled_by['name']}, are not plain values"
    return ""


class _Enough(BaseException):
    """All steps are compared, or no more are wanted: no error, after which a run would save itself."""


class _ComparedStore(StoreWriter):
    """Tells of every step that is committed."""

    on_step: Callable[[int], None]

    def step(self, record: StepRecord) -> None:
        super().step(record)
        self.on_step(record.step)


class _Regeneration(PPOTraining):
    kept = False

    def __init__(self, config: PPOConfig, on_step: Callable[[int], None]) -> None:
        super().__init__(config, get_custom_dataset("train", dataset_config=config.train_dataset), [])
        self._on_step = on_step

    def _make_store(self, directory: Path) -> StoreWriter:
        store = _ComparedStore(directory)
        store.on_step = self._on_step
        return store


def _config(values: Mapping[str, Any], directory: Path, total_steps: int, threads: int | None) -> PPOConfig:
    """The same run elsewhere, without what does not change its steps."""
    known = {field.name for field in fields(PPOConfig)}  # a user's class may have more
    config = build(PPOConfig, {name: value for name, value in values.items() if name in known})
    if not config.train_dataset.path:
        raise ConfigError("train_dataset.path is empty; a run whose tasks have no name cannot be sampled again")
    return replace(
        config,
        output_dir=str(directory),
        trial_name=TRIAL,
        total_train_steps=total_steps,
        valid_dataset=DatasetConfig(),
        saver=SaverConfig(freq_steps=None),
        metrics=MetricsConfig(),
        viewer=ViewerConfig(),
        store=StoreConfig(),
        scheduler=replace(config.scheduler, threads=threads or config.scheduler.threads),
    )


def _reasons(config: PPOConfig, machine: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Why bits need not be the same."""
    reasons = differences(machine, machine_facts(config.actor.device, machine.get("threads", 0)))
    reasons += differences(machine, here, DECISIVE_IN_SAMPLING)
    if config.actor.recompute_logprob is not True:
        reasons.append(
            f"actor.recompute_logprob={config.actor.recompute_logprob} trains on the engine's log-probs, whose last "
            "bits depend on what it computed at that moment"
        )
    return tuple(reasons)


def _compare(store: StoreReader, again: StoreReader, step: int, reasons: tuple[str, ...]) -> Taken:
    (then, stored), (now, found) = _step(store, step), _step(again, step)
    figures = [Figure(name, stored.get(name), found.get(name)) for name in COMPARED_FIGURES]
    return Taken(
        step,
        reasons,
        store.altered(step),
        then.digest,
        now.digest,
        [each for each in figures if each.stored != each.found],
        sampled=_sampled_otherwise(store.checks(step), again.checks(step)),
    )


def _step(reader: StoreReader, step: int) -> tuple[StoredStep, dict[str, Any]]:
    """With its line of metrics."""
    (stored,) = [each for each in reader.steps(after=step - 1) if each.step == step]
    return stored, step_metrics(reader, step)


def _sampled_otherwise(then: GroupChecks, now: GroupChecks) -> list[Altered]:
    """By the checksums of both; nothing if the run does not keep its own."""
    if not then:
        return []
    if list(then) != list(now):
        return [Altered(GROUPS)]
    return [
        Altered(name, task_id)
        for task_id, checks in then.items()
        for name in differing_fields(checks, now[task_id])
        if name not in UNCOMPARED
    ]
