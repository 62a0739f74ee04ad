"""Train an agent's model by reinforcement; what `PPOTrainer` does once everything is checked (`trainers.py`).

`PPOTraining` assembles the parts that the config names. `_PPORun` is the run; its `_steps` is the training loop, a good
place to begin reading.
"""

import time
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from areal.api.engine_api import WeightUpdate
from areal.api.errors import NonFiniteUpdate
from areal.api.messages import GroupResult
from areal.config.experiment import PPOConfig
from areal.config.presets import filled, lines
from areal.engine.models import sampling_kernel
from areal.engine.training.engine import TrainingEngine
from areal.engine.training.learner import Critic, Learner
from areal.infra.scheduler import Ask
from areal.rollout.admission import Admission
from areal.rollout.loading import WorkflowSpec
from areal.store.reader import StoreReader
from areal.store.schema import PUBLISHED
from areal.trainer import notices
from areal.trainer.canary import Canaries
from areal.trainer.engines import on_this_machine, with_adapters
from areal.trainer.evaluation import by_task
from areal.trainer.fleet import Fleet, all_asks
from areal.trainer.journal import AFTER, BEFORE, DURING, Journal, overlap, pause_figures, step_figures
from areal.trainer.learners import open_critic, policy_update
from areal.trainer.run import Interrupted, RunParts, TrainingRun, TrainingWork, TrainResult, events_to
from areal.trainer.tasks import Settled, task_stream
from areal.trainer.update import PolicyUpdate, UpdateResult
from areal.trajectory.tensors import tensors_of_group
from areal.utils.callables import name_of
from areal.utils.installing import install_hint
from areal.utils.threads import ThreadPlan, plan_threads

Tasks = list[dict[str, Any]]
GroupFilter = Callable[[dict[str, Any]], bool]
"""Given a group's tensor dict, whether to train on it."""


class PPOTraining(TrainingWork):
    config: PPOConfig

    def __init__(self, config: PPOConfig, tasks: Tasks, valid: Tasks, *, tasks_named: bool = True) -> None:
        """`valid`: held-out tasks; empty = nothing is evaluated. `tasks_named`: the config says where `tasks` are."""
        self._sampled_by: dict[str, Any] = {"train_dataset": "config" if tasks_named else "object"}
        self._valid = valid
        rollout = with_adapters(config.rollout, config.actor.lora)
        if config.scheduler.type == "local":  # else the engine's machine is another
            rollout = on_this_machine(rollout)
        config = config if rollout is config.rollout else replace(config, rollout=rollout)
        self._resolved = config.resolved
        config = copy(config)
        config.actor = filled(config.actor, self._resolved.algorithm)
        super().__init__(config, tasks)

    def train(
        self, train_spec: WorkflowSpec, eval_spec: WorkflowSpec, dynamic_filter_fn: GroupFilter | None = None
    ) -> TrainResult:
        """Train to the last step, or to Ctrl-C; everything is saved either way."""
        config = self.config
        dynamic_sampling = config.algorithm.dynamic_sampling
        filtered = "actor.dynamic_sampling" if dynamic_sampling else None
        filtered = filtered if dynamic_filter_fn is None else name_of(dynamic_filter_fn)
        self._sampled_by |= {**train_spec.described(), "filter": filtered}
        threads = plan_threads(config.rollout.max_head_offpolicyness, config.scheduler.threads)
        torch.set_num_threads(threads.trainer)
        plan = _Plan(config, self._tasks, self._valid, dynamic_filter_fn, dynamic_sampling)
        return self._until_no_rank_is_lost(lambda: self._attempt(plan, train_spec, eval_spec, threads))

    def _attempt(
        self, plan: "_Plan", train_spec: WorkflowSpec, eval_spec: WorkflowSpec, threads: ThreadPlan
    ) -> TrainResult:
        config = self.config
        with self._open_run(self._total_steps * config.actor.ppo_n_minibatches) as parts:
            standing = parts.standing
            update = policy_update(
                config,
                parts.engine,
                parts.critic,
                directory=parts.directory.path,
                seen_difference=standing.saved_account.max_logprob_difference,
            )
            with Journal(
                parts.directory,
                parts.store,
                parts.total_steps,
                standing.step,
                standing.account,
                parts.exporter,
                parts.trackers,
                saved_step=standing.saved_step,
                quiet=config.quiet,
            ) as journal:
                journal.progress.note("\n".join([*self._hello(parts), threads.reason, *lines(self._resolved)]))
                with journal.progress.spinner("starting the engine and the rollout workers"):
                    fleet = Fleet(
                        config,
                        self._model,
                        self._tokenizer_dir,
                        train_spec,
                        eval_spec,
                        logs=parts.directory.logs,
                        engine_threads=threads.engine,
                        cluster=parts.cluster,
                        on_event=events_to(parts.store),
                        status=parts.status,
                    )
                with fleet, parts.showing(fleet):
                    return _PPORun(plan, parts, update, journal, fleet).execute()

    def _fingerprint(self) -> dict[str, Any]:
        config = self.config
        settings = {
            "gconfig.n_samples": config.gconfig.n_samples,
            "critic.path": config.critic.path or None,
            "teacher.path": config.teacher.path or None,
        }
        return {**super()._fingerprint(), **settings}

    def _machine(self) -> dict[str, Any]:
        rollout, facts = self.config.rollout, super()._machine()
        if rollout.foreign_engines or self.config.scheduler.type != "local":  # then it is another machine that draws
            return facts
        return {**facts, "kernel": sampling_kernel(self._model, rollout.kernel, rollout.device)}

    def _meta(self) -> dict[str, Any]:
        algorithm = {"name": self._resolved.algorithm.name, "settings": list(map(asdict, self._resolved.table))}
        return {**super()._meta(), "sampled_by": self._sampled_by, "algorithm": algorithm}

    def _asks(self) -> list[Ask]:
        return all_asks(self.config)

    def _open_critic(self, engine: Learner, optimizer_steps: int) -> Critic | None:
        return open_critic(self.config, engine, optimizer_steps)


@dataclass(frozen=True)
class _Plan:
    config: PPOConfig
    tasks: Tasks
    valid: Tasks
    """Held-out tasks; empty = nothing is evaluated."""
    filter: GroupFilter | None
    dynamic_sampling: bool
    """Groups whose episodes all have one reward are not trained on. `config` would work it out for each group."""

    def keep(self, group: GroupResult) -> bool:
        if self.dynamic_sampling and len({episode.reward for episode in group.episodes}) < 2:
            return False
        return self.filter is None or self.filter(tensors_of_group(group))


class _PPORun(TrainingRun):
    def __init__(self, plan: _Plan, parts: RunParts, update: PolicyUpdate, journal: Journal, fleet: Fleet) -> None:
        super().__init__(plan.config, parts, journal.progress, lambda: fleet.call_soon(self._stop_waiting))
        self._plan = plan
        self._config = plan.config
        self._update = update
        self._journal = journal
        self._fleet = fleet
        self._canaries = Canaries.of(plan.config, parts.tokenizer)
        self._settled = parts.standing.settled
        """Tasks that were trained by `_step`, or rejected."""
        self._training: list[tuple[float, float]] = []
        """When the trainer was computing, as (start, end)."""
        self._cpu_before: dict[str, float] = {}
        self._rejected_before: Counter[str] = Counter()
        """Episodes that earlier sessions of the run rejected, by reason."""
        self._account_then: dict[str, Any] | None = None
        """The totals as of `_step` while that is an earlier one than the journal's."""

    def _train(self) -> None:
        self._begin()
        if self._step == 0:  # a resumed run is compared with what was measured before its first step
            self._evaluate_both(BEFORE)
        elif self._due(self._config.evaluator.freq_steps) and not self._journal.was_evaluated(self._step):
            self._evaluate(DURING)
        self._steps()
        self._evaluate_both(AFTER)

    def _steps(self) -> None:
        """Take a batch, learn from it, write that down, give the engine the new weights.

        What is written down has happened, whatever is killed; what is not has not, and its groups are still ready.
        """
        while self._step < self._total_steps:
            began = time.monotonic()
            groups = self._fleet.take(self._config.train_dataset.batch_size)
            taken = time.monotonic()
            version = self._engine.version
            learned = self._learn(groups)
            trained = time.monotonic()
            self._training.append((taken, trained))
            weights = self._engine.publish(self._config.rollout.dtype)
            figures = {**self._figures(began, taken, trained), **step_figures(groups, version, learned.figures)}
            figures |= {f"{name}_seconds": seconds for name, seconds in learned.seconds.items()}
            rejected, dropped = self._fleet.pop_lost()
            row = self._journal.commit(self._step + 1, groups, weights, figures, learned.rows, dropped)
            self._settle(groups, rejected)
            try:
                self._publish(weights)
            finally:  # what is committed is exported, even if the engine never got these weights
                now = time.monotonic()
                self._journal.step(
                    self._step, groups, {**row, "step_seconds": now - began, "publish_seconds": now - trained}
                )
            if self._due(self._saver.freq_steps):
                self._save()
            if self._due(self._config.evaluator.freq_steps):
                self._evaluate(DURING)
            self._interruption.check()

    def _learn(self, groups: list[GroupResult]) -> UpdateResult:
        """Until `_settle`, the weights are those of no step that is written down."""
        self._between_steps = True
        try:
            return self._update.step(groups)
        except NonFiniteUpdate:
            if self._config.actor.ppo_n_minibatches == 1 and self._critic is None:
                self._between_steps = False  # nothing was changed
            raise

    def _settle(self, groups: list[GroupResult], rejected: list[int]) -> None:
        """The step is written down: from here on a checkpoint must have it."""
        self._step, self._between_steps = self._step + 1, False
        for task_id in (*(group.task_id for group in groups), *rejected):
            self._settled.add(task_id)

    def _begin(self) -> None:
        """Come to the step that the run had reached, and start episodes."""
        config, plan = self._config, self._plan
        batch_size = config.train_dataset.batch_size
        if isinstance(self._engine, TrainingEngine):  # ranks know where they publish
            self._engine.shared_dir = self._fleet.shared_memory
        self._rebuild()
        with StoreReader(self._directory.path) as reader:
            ready = reader.ready()
            self._rejected_before.update(reader.rejected())
            for task_id in reader.settled():
                self._settled.add(task_id)
        admission = Admission(
            batch_size=batch_size,
            max_staleness=config.rollout.max_head_offpolicyness,
            max_running=max(1, config.rollout.max_concurrent_rollouts // config.gconfig.n_samples),
            total_groups=self._total_steps * batch_size,
            consumed=self._step * batch_size,
            when_stale=config.rollout.when_stale,
        )
        begun = Settled(self._settled.below, set(self._settled.beyond))
        for group in ready:
            begun.add(group.task_id)
        tasks = task_stream(plan.tasks, config.seed, begun, shuffle=config.train_dataset.shuffle)
        self._journal.start_clock()
        self._cpu_before = self._fleet.cpu_seconds()
        self._fleet.begin(tasks, admission, plan.keep, self._store, ready)
        self._publish(self._engine.publish(config.rollout.dtype))

    def _publish(self, weights: WeightUpdate) -> None:
        """Give the engines the present weights."""
        self._fleet.publish(weights if self._canaries is None else self._canaries.attached(weights, self._engine))
        self._store.event(PUBLISHED, {"version": weights.version, "digest": weights.digest})

    def _rebuild(self) -> None:
        """Train the steps since the checkpoint again, from their stored batches."""
        with StoreReader(self._directory.path) as reader:
            same = self._is_known(reader, self._step)
            for stored in reader.steps(after=self._step):
                groups = reader.batch(stored.step)
                assert groups, "find_standing has taken back what is not kept"
                self._learn(groups)
                self._step, self._between_steps, self._account_then = stored.step, False, stored.account
                for group in groups:
                    self._settled.add(group.task_id)
                same = same and self._is_known(reader, self._step)
                if self._due(self._saver.freq_steps):
                    self._save()
                self._interruption.check()
        self._account_then = None

    def _is_known(self, reader: StoreReader, step: int) -> bool:
        """Whether the present weights are those that the run had after this step, as far as the store knows."""
        known, found = reader.digest(step), self._engine.publish(self._config.rollout.dtype).digest
        if known is not None and known != found:
            self._progress.say(
                f"the weights of step {step} are not those that the run had: another machine, library, setting or "
                "model; the run goes on with these"
            )
            return False
        return True

    def _figures(self, began: float, taken: float, trained: float) -> dict[str, float]:
        """What is known of a step besides its batch and its update."""
        counts = self._rejected()
        rejected = {f"rejected/{reason}": float(count) for reason, count in counts.items()}
        now = time.monotonic()
        return {
            "step_seconds": now - began,
            "wait_seconds": taken - began,
            "expiring_wait_seconds": self._fleet.expiring_wait_seconds,
            "train_seconds": trained - taken,
            "publish_seconds": now - trained,
            "rejected": float(counts.total()),
            **rejected,
        }

    def _rejected(self) -> Counter[str]:
        """Episodes of the whole run by reason."""
        return self._rejected_before + Counter[str](self._fleet.rejections.counts)

    def _evaluate_both(self, when: str) -> None:
        """Sampled, and greedily if the config asks for it; not again if a resumed run has done so already."""
        for greedy in (False, True) if self._config.evaluator.greedy else (False,):
            if not self._journal.has_evaluation(when, greedy=greedy):
                self._evaluate(when, greedy=greedy)

    def _evaluate(self, when: str, *, greedy: bool = False) -> None:
        if self._plan.valid:
            samples = 1 if greedy else self._config.evaluator.n_samples
            how = "greedily " if greedy else ""
            with self._progress.waiting(f"evaluating {how}on {len(self._plan.valid)} held-out tasks"):
                results = self._fleet.evaluate(self._plan.valid * samples, greedy=greedy)
            self._journal.evaluation(self._step, when, by_task(results, len(self._plan.valid)), greedy=greedy)

    def _state(self) -> dict[str, Any]:
        settled = {"below": self._settled.below, "beyond": sorted(self._settled.beyond)}
        return {"settled": settled, "account": self._account_then or asdict(self._journal.account)}

    def _stop_waiting(self) -> None:
        """Ctrl-C: whatever waits for episodes raises Interrupted. Runs on the fleet's event loop."""
        self._progress.say(notices.STOPPING)
        self._store.stop_waiting()
        self._fleet.fail(Interrupted())

    def _summary(self) -> dict[str, Any]:
        generating = self._fleet.engine_activity()
        return {
            **self._journal.summary(),
            "overlap": overlap(self._training, generating),
            "generating_seconds": sum(end - start for start, end in generating),
            "training_seconds": sum(end - start for start, end in self._training),
            "weight_pause_seconds": pause_figures(self._fleet.engine_pauses()),
            "cpu_seconds": {name: used - self._cpu_before[name] for name, used in self._fleet.cpu_seconds().items()},
            "rejections": dict(self._rejected()),
            "stalls": self._fleet.stalls,
        }

    def _result_lines(self, summary: dict[str, Any]) -> list[str]:
        return notices.results(summary)

    def _verdicts(self, summary: dict[str, Any]) -> list[str]:
        return notices.verdicts(summary)

    def _draw_curve(self) -> Path | None:
        if find_spec("matplotlib") is None:
            self._progress.say(f"the curve is not drawn without matplotlib; {install_hint('plot')}, or areal view")
            return None
        self._journal.draw()
        return self._directory.curve
