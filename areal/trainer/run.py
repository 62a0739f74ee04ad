"""Ctrl-C: the first one asks a run to end in order, the second ends it at once."""

# MERGED-DOC
# What a run is made from, and what it leaves. Plain values; nothing happens here.
# One training run from its first process to its last line. `_steps` is the loop; read it first.

import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from areal.api.errors import ArealError
from areal.api.messages import GroupResult
from areal.config.experiment import PPOConfig
from areal.engine.models import find_model, open_trainable
from areal.engine.training.engine import TrainingEngine
from areal.rollout.admission import Admission
from areal.rollout.loading import WorkflowSpec
from areal.trainer import display
from areal.trainer.checkpoint import load_checkpoint, save_checkpoint
from areal.trainer.fleet import Fleet
from areal.trainer.journal import AFTER, BEFORE, DURING, Account, Journal, overlap, pause_figures, step_figures
from areal.trainer.run_directory import RunDirectory, told_in_one_line
from areal.trainer.tasks import Settled, task_stream
from areal.trainer.update import PolicyUpdate
from areal.trajectory.tensors import tensors_of_group
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.threads import plan_threads


class Interrupted(Exception):
    """The user asked the run to end; everything is to be saved."""


class Interruption:
    """While entered, SIGINT only sets a flag and calls `tell`, which must be safe inside a signal handler."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self._asked = False
        # Python delivers signals to the main thread only, and only it may choose what they do.
        self._works = threading.current_thread() is threading.main_thread()

    def check(self) -> None:
        """Raise `Interrupted` if Ctrl-C has come."""
        if self._asked:
            raise Interrupted

    def __enter__(self) -> Self:
        if self._works:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._works:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._tell()


Tasks = list[dict[str, Any]]
GroupFilter = Callable[[dict[str, Any]], bool]
"""Given a group's tensor dict, whether to train on it."""


@dataclass(frozen=True)
class RunPlan:
    config: PPOConfig
    directory: RunDirectory
    model: Path
    tokenizer: Path
    tasks: Tasks
    valid: Tasks
    """Held-out tasks; empty = nothing is evaluated."""
    total_steps: int
    workflow: WorkflowSpec
    eval_workflow: WorkflowSpec
    keep: GroupFilter | None

    @property
    def total_groups(self) -> int:
        return self.total_steps * self.config.train_dataset.batch_size


@dataclass(frozen=True)
class TrainResult:
    run_dir: Path
    model_dir: Path
    summary: dict[str, Any]


class TrainingRun:
    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._config = plan.config
        self._threads = plan_threads(plan.config.rollout.max_head_offpolicyness, plan.config.scheduler.threads)
        torch.set_num_threads(self._threads.trainer)
        self._tokenizer = load_hf_tokenizer(plan.tokenizer)
        self._engine = self._make_engine(plan.model)
        self._step, self._settled, self._account = self._resume()
        penalised = self._config.actor.kl_ctl > 0
        reference = self._make_engine(find_model(self._config.ref.path), learns=False) if penalised else None
        self._update = PolicyUpdate(
            self._engine,
            self._config.actor,
            reference,
            self._config.seed,
            seen_difference=self._account.max_logprob_difference,
            same_arithmetic=self._config.rollout.dtype == "float32",
        )
        self._training: list[tuple[float, float]] = []

    def execute(self) -> TrainResult:
        """Train to the end; on Ctrl-C save and raise KeyboardInterrupt."""
        plan = self._plan
        with (
            told_in_one_line(plan.directory.path),
            closing(self._engine),
            Journal(plan.directory, plan.total_steps, self._step, self._account) as self._journal,
        ):
            self._say = self._journal.progress.say
            self._say(display.hello(plan.directory.path, self._step, self._threads))
            with self._journal.progress.spinner("starting the engine and the rollout workers"):
                self._fleet = self._make_fleet()
            with closing(self._fleet):
                return self._train()

    def _train(self) -> TrainResult:
        try:
            with Interruption(lambda: self._fleet.soon(self._stop_soon)) as self._interruption:
                self._begin()
                self._evaluate_first()
                self._steps()
                self._evaluate_both(AFTER)
        except Interrupted:
            self._stop()
            raise KeyboardInterrupt from None
        except ArealError:
            if self._step:
                self._stop()
            raise
        return self._finish()

    def _steps(self) -> None:
        """Take a batch, learn from it, give the engine the new weights, write down what happened."""
        while self._step < self._plan.total_steps:
            began = time.monotonic()
            groups = self._fleet.take(self._config.train_dataset.batch_size)
            taken = time.monotonic()
            version = self._engine.version
            policy = self._update.step(groups)
            self._training.append((taken, time.monotonic()))
            self._settle(groups)
            self._fleet.publish(self._engine.publish())
            self._note(groups, {**step_figures(groups, version, policy), "wait_seconds": taken - began}, began)
            if self._due(self._config.saver.freq_steps):
                self._save()
            if self._due(self._config.evaluator.freq_steps):
                self._evaluate(DURING)
            self._interruption.check()

    def _begin(self) -> None:
        """From here on episodes run."""
        config, plan = self._config, self._plan
        admission = Admission(
            batch_size=config.train_dataset.batch_size,
            max_staleness=config.rollout.max_head_offpolicyness,
            max_running=max(1, config.rollout.max_concurrent_rollouts // config.gconfig.n_samples),
            total_groups=plan.total_groups,
            consumed=self._step * config.train_dataset.batch_size,
        )
        tasks = task_stream(plan.tasks, config.seed, self._settled, shuffle=config.train_dataset.shuffle)
        self._journal.start_clock()
        self._cpu_before = self._fleet.cpu_seconds()
        self._fleet.begin(tasks, admission, self._keep)
        self._fleet.publish(self._engine.publish())

    def _keep(self, group: GroupResult) -> bool:
        return self._plan.keep is None or self._plan.keep(tensors_of_group(group))

    def _settle(self, groups: list[GroupResult]) -> None:
        """The weights have changed: from here on a checkpoint must say so, whatever else goes wrong."""
        self._step += 1
        for task_id in (*(group.task_id for group in groups), *self._fleet.pop_rejected()):
            self._settled.add(task_id)

    def _note(self, groups: list[GroupResult], figures: dict[str, float], began: float) -> None:
        counts = self._fleet.tally.counts
        rejected = {f"rejected/{reason}": float(count) for reason, count in counts.items()}
        seconds = {"step_seconds": time.monotonic() - began}
        self._journal.step(self._step, groups, {**seconds, "rejected": float(counts.total()), **rejected, **figures})

    def _evaluate_first(self) -> None:
        """What the run is compared with; a resumed run remembers it, because its own start is no start."""
        if self._step == 0:
            self._evaluate_both(BEFORE)

    def _evaluate_both(self, when: str) -> None:
        for greedy in (False, True) if self._config.evaluator.greedy else (False,):
            if not self._journal.remembers(when, greedy=greedy):
                self._evaluate(when, greedy=greedy)

    def _evaluate(self, when: str, *, greedy: bool = False) -> None:
        if self._plan.valid:
            results = self._fleet.evaluate(self._plan.valid, greedy=greedy)
            self._journal.evaluation(self._step, when, results, greedy=greedy)

    def _save(self) -> Path:
        target = self._plan.directory.checkpoint(self._step)
        settled = {"below": self._settled.below, "beyond": sorted(self._settled.beyond)}
        state = {"step": self._step, "settled": settled, "account": asdict(self._journal.account)}
        save_checkpoint(target, self._engine, self._tokenizer, state)
        self._plan.directory.prune(self._config.saver.keep)
        return target

    def _resume(self) -> tuple[int, Settled, Account]:
        """Where the newest checkpoint left off; the beginning, if there is none."""
        checkpoints = self._plan.directory.checkpoints()
        if not checkpoints:
            return 0, Settled(), Account()
        state = load_checkpoint(checkpoints[-1], self._engine)
        settled = Settled(state["settled"]["below"], set(state["settled"]["beyond"]))
        return state["step"], settled, Account(**state["account"])

    def _stop_soon(self) -> None:
        self._say(display.stopping())
        self._fleet.fail(Interrupted())

    def _stop(self) -> None:
        """End before the last step, with everything saved."""
        if self._step:
            self._save()
            self._journal.draw()
        self._journal.progress.close()
        self._say(display.stopped(self._plan.directory.path, self._step, self._plan.total_steps))

    def _finish(self) -> TrainResult:
        directory, generating = self._plan.directory, self._fleet.engine_activity()
        summary = {
            "steps": self._step,
            **self._journal.summary(),
            "overlap": overlap(self._training, generating),
            "generating_seconds": sum(end - start for start, end in generating),
            "training_seconds": sum(end - start for start, end in self._training),
            "weight_pause_seconds": pause_figures(self._fleet.engine_pauses()),
            "cpu_seconds": {name: used - self._cpu_before[name] for name, used in self._fleet.cpu_seconds().items()},
            "rejections": dict(self._fleet.tally.counts),
            "stalls": self._fleet.stalls,
        }
        model, curve = self._save(), self._journal.draw()
        directory.finish(summary)
        self._journal.progress.close()
        self._say(display.closing(summary, directory.path, model, curve))
        return TrainResult(directory.path, model, summary)

    def _due(self, freq_steps: int | None) -> bool:
        return freq_steps is not None and self._step % freq_steps == 0 and self._step < self._plan.total_steps

    def _make_engine(self, model: Path, *, learns: bool = True) -> TrainingEngine:
        forgets = learns and self._config.actor.gradient_checkpointing
        return TrainingEngine(
            open_trainable(model, gradient_checkpointing=forgets),
            self._config.actor.optimizer,
            total_steps=self._plan.total_steps * self._config.actor.ppo_n_minibatches,
            max_tokens_per_mb=self._config.actor.max_tokens_per_mb,
        )

    def _make_fleet(self) -> Fleet:
        plan = self._plan
        return Fleet(
            self._config,
            plan.model,
            plan.tokenizer,
            plan.workflow,
            plan.eval_workflow,
            logs=plan.directory.logs,
            engine_threads=self._threads.engine,
        )
