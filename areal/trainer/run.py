"""One training run from its first process to its last line. `_steps` is the loop; read it first."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from areal.api.messages import GroupResult
from areal.config.experiment import PPOConfig
from areal.engine.architecture import read_architecture
from areal.engine.models import find_model
from areal.engine.training import TrainingEngine
from areal.rollout.admission import Admission
from areal.rollout.workflows import WorkflowSpec
from areal.trainer.checkpoint import load_checkpoint, save_checkpoint
from areal.trainer.evaluation import overlap
from areal.trainer.fleet import Fleet
from areal.trainer.group_tensors import tensors_of
from areal.trainer.journal import Journal
from areal.trainer.policy import PolicyUpdate
from areal.trainer.run_directory import RunDirectory
from areal.trainer.step_figures import step_figures
from areal.trainer.tasks import Settled, task_stream
from areal.trainer.threads import plan_threads
from areal.utils.hf_utils import load_hf_tokenizer

Tasks = list[dict[str, Any]]
GroupFilter = Callable[[dict[str, Any]], bool]
"""Given a group's tensor dict, whether to train on it."""


class Interrupted(Exception):
    """Ctrl-C: end as soon as the present step is done, with everything saved."""


@dataclass(frozen=True)
class Plan:
    """Everything a run is made from."""

    config: PPOConfig
    directory: RunDirectory
    model: Path
    tokenizer: Path
    tasks: Tasks
    valid: Tasks
    total_steps: int
    workflow: WorkflowSpec
    eval_workflow: WorkflowSpec
    keep: GroupFilter | None


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves."""

    run_dir: Path
    model_dir: Path
    summary: dict[str, Any]


class TrainingRun:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        self._threads = plan_threads(plan.config.rollout.max_head_offpolicyness)
        torch.set_num_threads(self._threads.trainer)
        self._tokenizer = load_hf_tokenizer(plan.tokenizer)
        self._engine = self._make_engine(plan.model)
        self._settled = Settled()
        self._step = self._resume()
        reference = self._make_engine(find_model(self._config.ref.path)) if self._config.actor.kl_ctl else None
        self._update = PolicyUpdate(self._engine, self._config.actor, reference, self._config.seed)
        self._training: list[tuple[float, float]] = []
        self._interrupted = False

    def execute(self) -> TrainResult:
        """Train to the end; on Ctrl-C save and raise KeyboardInterrupt."""
        try:
            with Journal(self._plan.directory, self._plan.total_steps, self._step) as journal:
                self._journal = journal
                self._say_hello()
                with journal.progress.spinner("starting the engine and the rollout workers"):
                    self._fleet = self._make_fleet()
                try:
                    return self._train()
                finally:
                    self._fleet.close()
        finally:
            self._engine.close()

    def _train(self) -> TrainResult:
        try:
            with self._interruptible():
                self._begin()
                self._evaluate_both("before")
                self._steps()
                self._evaluate_both("after")
        except Interrupted:
            self._save()
            self._journal.draw()
            self._say_goodbye()
            raise KeyboardInterrupt from None
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
            self._fleet.publish(self._engine.publish())
            self._step += 1
            self._note(groups, {**step_figures(groups, version, policy), "wait_seconds": taken - began}, began)
            if self._due(self._config.saver.freq_steps):
                self._save()
            if self._due(self._config.evaluator.freq_steps):
                self._evaluate("during")
            if self._interrupted:
                raise Interrupted

    def _begin(self) -> None:
        config = self._config
        per_group = config.gconfig.n_samples
        admission = Admission(
            batch_size=config.train_dataset.batch_size,
            max_staleness=config.rollout.max_head_offpolicyness,
            max_running=max(1, config.rollout.max_concurrent_rollouts // per_group),
            total_groups=self._plan.total_steps * config.train_dataset.batch_size,
            consumed=self._step * config.train_dataset.batch_size,
        )
        tasks = task_stream(self._plan.tasks, config.seed, self._settled, shuffle=config.train_dataset.shuffle)
        self._journal.start_clock()
        self._fleet.begin(tasks, admission, self._keep)
        self._fleet.publish(self._engine.publish())

    def _keep(self, group: GroupResult) -> bool:
        return self._plan.keep is None or self._plan.keep(tensors_of(group))

    def _note(self, groups: list[GroupResult], figures: dict[str, float], began: float) -> None:
        for group in groups:
            self._settled.add(group.task_id)
        seconds = time.monotonic() - began
        tally = self._fleet.tally
        rejected = {f"rejected/{reason}": float(count) for reason, count in tally.counts.items()}
        self._journal.step(
            self._step,
            groups,
            {
                "step_seconds": seconds,
                "tokens_per_second": figures["tokens"] / seconds,
                "rejected": float(tally.counts.total()),
                **rejected,
                **figures,
            },
        )

    def _evaluate_both(self, when: str) -> None:
        self._evaluate(when)
        if self._config.evaluator.greedy:
            self._evaluate(when, greedy=True)

    def _evaluate(self, when: str, greedy: bool = False) -> None:
        if self._plan.valid:
            results = self._fleet.evaluate(self._plan.valid, greedy=greedy)
            self._journal.evaluation(self._step, when, results, greedy=greedy)

    def _save(self) -> Path:
        target = self._plan.directory.checkpoint(self._step)
        state = {
            "step": self._step,
            "settled_below": self._settled.below,
            "settled_beyond": sorted(self._settled.beyond),
        }
        save_checkpoint(target, self._engine, self._tokenizer, state)
        self._plan.directory.prune(self._config.saver.keep)
        return target

    def _resume(self) -> int:
        """Go on from the newest checkpoint, if there is one."""
        checkpoints = self._plan.directory.checkpoints()
        if not checkpoints:
            return 0
        state = load_checkpoint(checkpoints[-1], self._engine)
        self._settled = Settled(state["settled_below"], set(state["settled_beyond"]))
        return int(state["step"])

    def _finish(self) -> TrainResult:
        known = self._journal.summary()
        summary = {
            "steps": self._step,
            **known,
            "overlap": overlap(self._training, self._fleet.engine_activity()),
            "training_seconds": sum(end - start for start, end in self._training),
            "cpu_seconds": self._fleet.cpu_seconds(),
            "rejections": dict(self._fleet.tally.counts),
        }
        model, curve = self._save(), self._journal.draw()
        self._plan.directory.finish(summary)
        self._say_verdict(summary, model, curve)
        return TrainResult(self._plan.directory.path, model, summary)

    def _due(self, freq_steps: int | None) -> bool:
        return freq_steps is not None and self._step % freq_steps == 0 and self._step < self._plan.total_steps

    def _make_engine(self, model: Path) -> TrainingEngine:
        return TrainingEngine(
            read_architecture(model),
            self._config.actor.optimizer,
            total_steps=self._plan.total_steps * self._config.actor.ppo_n_minibatches,
            max_tokens_per_mb=self._config.actor.max_tokens_per_mb,
            directory=model,
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

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends the run in order, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self._fleet.fail_soon(Interrupted())

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _say_hello(self) -> None:
        resumed = f"resuming after step {self._step}; " if self._step else ""
        self._journal.progress.say(
            f"{resumed}run directory {self._plan.directory.path} · threads: {self._threads.reason}"
        )

    def _say_goodbye(self) -> None:
        path = self._plan.directory.path
        self._journal.progress.say(
            f"stopped after step {self._step} of {self._plan.total_steps}; everything is saved in {path}\n"
            f"to go on, give the same command with trial_name={path.name}"
        )

    def _say_verdict(self, summary: dict[str, Any], model: Path, curve: Path) -> None:
        say = self._journal.progress.say
        cpu = " · ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["cpu_seconds"].items())
        say(
            f"{summary['calls']:,} model calls, {summary['calls_per_second']:.0f} per second · CPU: {cpu} · "
            f"engine busy during {summary['overlap']:.0%} of training · "
            f"engine and trainer log-probs differ by at most {summary['max_logprob_difference']:.0e}"
        )
        greedy = summary["held_out"].get("after_greedy")
        if greedy:
            before = summary["held_out"]["before_greedy"]["reward"]
            say(f"greedy: {before:.2f} → {greedy['reward']:.2f} on {greedy['tasks']} held-out tasks")
        if "verdict" in summary:
            say(summary["verdict"])
        say(
            f"curve:   {curve}\nrun:     {self._plan.directory.path}\nmodel:   {model}\ntalk to it:  areal chat {model}"
        )
