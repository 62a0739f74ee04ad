"""Take the steps of a run again, from its stored batches, and compare what they lead to.

Sampling is what makes an asynchronous run unrepeatable: which tokens met which weights, and in which order groups were
trained. The store has both, so learning follows from it: on the same machine with the same number of threads, every
step leads to weights with the same digest. Elsewhere sums are added up in another order, and numbers are compared
within a tolerance.

Nothing is written into the run's directory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError, NonFiniteUpdate
from areal.config.experiment import PPOConfig
from areal.config.loader import build
from areal.engine.model.adapter import is_adapter, open_adapter
from areal.engine.model.published import NamedTensors, WeightReader
from areal.engine.models import find_model, open_trainable
from areal.engine.training.learner import Learner
from areal.store.reader import GROUPS, ROWS, Altered, StoredStep, StoreReader
from areal.trainer.checkpoint import load_checkpoint
from areal.trainer.cluster import Cluster
from areal.trainer.learners import learning_settings, open_critic, open_learner, policy_update, threads_of_learner
from areal.trainer.machine import differences, machine_facts
from areal.trainer.ranks import rank_asks
from areal.trainer.run_directory import find_checkpoints
from areal.trainer.update import PolicyUpdate
from areal.utils.closing import Closing

RELATIVE, ABSOLUTE = 0.05, 1e-3
"""Where bits cannot be equal, a figure of a step may differ by this much of itself, and by this much anyway."""
WEIGHTS_APART = 0.05
"""There, weights may lie this far from a checkpoint's, as a share of how far training has moved these."""
SHOWN = 3
"""How many of several things a sentence names."""
SEEN_STEPS = 16
"""How many steps after a version was published are searched for a group that was sampled with it."""


@dataclass(frozen=True)
class Figure:
    """One of a step's, as the run wrote it down and as it is here; None = not a finite number."""

    name: str
    stored: float | None
    found: float | None

    @property
    def apart(self) -> float:
        """How far, in tolerances: above 1 is too far."""
        if self.stored is None or self.found is None:
            return 0.0 if self.stored == self.found else math.inf
        return abs(self.stored - self.found) / (ABSOLUTE + RELATIVE * abs(self.stored))


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor of a model that is not the same as in a checkpoint."""

    name: str
    values: int
    different: int
    largest: float


@dataclass(frozen=True)
class Taken:
    """A step that was taken again."""

    step: int
    other_machine: tuple[str, ...]
    """Why its bits need not be the same: facts of the machine that differ, here or at a step before."""
    altered: list[Altered]
    """What of its stored batch is not as it was written."""
    stored_digest: str
    digest: str | None
    """Of the weights that it led to here; None = it led to none."""
    figures: list[Figure]
    """Those that are not the same."""
    tensor: TensorDifference | None = None
    """Where the weights begin to differ, if they do and the run has a checkpoint of that step."""
    weights_apart: float | None = None
    """How far the weights are from that checkpoint's, as a share of how far training had moved these."""
    reported: str | None = None
    """The digest that engines had with these weights, if they are not the same and a later batch tells."""
    failure: str = ""
    """Why it led to no weights; no step after it can be taken."""
    sampled: list[Altered] = field(default_factory=list)
    """What was sampled otherwise, if it was sampled again."""

    @property
    def bit_equal(self) -> bool:
        return self.digest == self.stored_digest

    @property
    def diverges(self) -> bool:
        """Not what the run had, or not near enough where bits need not be the same."""
        if self.altered or self.failure or self.sampled:
            return True
        if not self.other_machine:
            return not self.bit_equal or bool(self.figures)
        return any(figure.apart > 1 for figure in self.figures) or (self.weights_apart or 0.0) > WEIGHTS_APART

    @property
    def cause(self) -> str:
        """What a step that diverges has of its own: the store, the samples, the weights or the figures."""
        if self.altered or self.reported == self.digest is not None:
            return "store"
        if self.sampled:
            return "samples"
        return "weights" if self.failure or not self.bit_equal else "figures"

    def describe(self) -> str:
        """How it differs from the run's, in a sentence without its end."""
        figures = ", ".join(f"{each.name} {each.found}, was {each.stored}" for each in self.figures[:SHOWN])
        if self.altered:
            parts = [f"its stored batch was altered: {_places(self.altered)}"]
        elif self.sampled:
            parts = [f"its batch was sampled otherwise: {_places(self.sampled)}"]
        elif self.cause == "store":
            parts = [f"its stored digest was altered: engines had been given {self.digest}, as here"]
        elif self.failure:
            parts = [self.failure]
        elif self.bit_equal:
            parts = ["its weights are the same, but its stored figures are not"]
        else:
            parts = ["its weights differ, with the batch as it was stored"]
        if self.tensor is not None:
            each = self.tensor
            parts.append(
                f"first in {each.name}: {each.different:,} of {each.values:,} values, by up to {each.largest:.1e}"
            )
        elif parts[0].startswith("its weights differ"):
            parts.append("in which tensor is not known: the run keeps no checkpoint of that step")
        return "; ".join(parts + ([figures] if figures else []))


@dataclass(frozen=True)
class ReplaySpan:
    """The steps that can be taken again, and from what."""

    start: int
    """The step of the checkpoint that it begins from; 0 = the model that the run began with."""
    last: int
    checkpoint: Path | None
    note: str = ""
    """Why it is not the whole run, if it is not."""


class Replay(Closing):
    def __init__(self, run: Path, *, start: int | None = None, threads: int | None = None) -> None:
        """`start`: the step of a checkpoint to begin from; None = the earliest possible. `threads` in place of the
        run's own. Raises ArealError if the run cannot be replayed from there."""
        with ExitStack() as stack:
            self._store = stack.enter_context(StoreReader(run, at_rest=True))
            self._config = learning_config(stored_config(self._store))
            self._checkpoints = find_checkpoints(run)
            self._steps = {each.step: each for each in self._store.steps()}
            self.span = find_span(self._store, self._checkpoints, start)
            self._sessions = self._store.sessions()
            self._given_threads = threads
            self._facts = machine_facts(self._config.actor.device, 0)
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            self._model = find_model(self._config.actor.path)
            self._engine, self._update = self._open(stack)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)  # the store explains what is damaged

    def steps(self) -> Iterator[Taken]:
        """Take one after the other. Raises ArealError if the weights to begin from are not those of the run."""
        self._check_start()
        other: dict[str, None] = {}
        for step in range(self.span.start + 1, self.span.last + 1):
            other |= dict.fromkeys(self._prepare(step))
            taken = self._take(self._steps[step], tuple(other))
            yield taken
            if taken.failure:
                return

    def _take(self, stored: StoredStep, other_machine: tuple[str, ...]) -> Taken:
        altered = self._store.altered(stored.step)
        taken = Taken(stored.step, other_machine, altered, stored.digest, None, [])
        if any(each.field in (ROWS, GROUPS) for each in altered):
            return replace(taken, failure="its batch is not the one that was trained")
        groups = self._store.batch(stored.step)
        if groups is None:
            raise ArealError(
                f"the tokens of step {stored.step} were removed since the replay began (store.keep_tokens): the run "
                "goes on; replay it when it has ended"
            )
        try:
            found = self._update.step(groups)
        except NonFiniteUpdate as error:
            return replace(taken, failure=str(error))
        weights = self._engine.publish(self._config.rollout.dtype)
        figures = [each for each in self._figures(stored.step, found.figures) if each.stored != each.found]
        taken = replace(taken, digest=weights.digest, figures=figures)
        if taken.bit_equal:
            return taken
        taken = replace(taken, reported=self._reported(stored.step))
        checkpoint = self._checkpoints.get(stored.step)
        if checkpoint is None:
            return taken
        return replace(
            taken,
            tensor=first_difference(weights, checkpoint),
            weights_apart=distance(weights, checkpoint, self.span.checkpoint or self._model) if other_machine else None,
        )

    def _figures(self, step: int, found: Mapping[str, float]) -> list[Figure]:
        """The update's own, by those of the step's line of metrics."""
        stored = step_metrics(self._store, step)
        return [Figure(name, stored[name], finite(found[name])) for name in sorted(found.keys() & stored.keys())]

    def _open(self, stack: ExitStack) -> tuple[Learner, PolicyUpdate]:
        config = self._config
        total = self._store.meta().get("total_steps") or config.total_train_steps
        if not total:
            raise ArealError(
                f"the learning rate of {self._store.path.parent} depends on how many steps it was to have, which its "
                "store does not say; only runs of this version, or with total_train_steps, can be replayed"
            )
        optimizer_steps = total * config.actor.ppo_n_minibatches
        cluster = self._open_cluster(stack) if config.actor.backend else None
        engine = open_learner(config, self._model, optimizer_steps, cluster)
        stack.callback(engine.close)
        critic = open_critic(config, engine, optimizer_steps)
        state: dict[str, Any] = {}
        if self.span.checkpoint is not None:
            state = load_checkpoint(self.span.checkpoint, engine, critic)
        seen = state.get("account", {}).get("max_logprob_difference")
        return engine, policy_update(config, engine, critic, seen_difference=seen)

    def _open_cluster(self, stack: ExitStack) -> Cluster:
        config = self._config
        if config.scheduler.type != "local":
            raise ArealError(
                f"ranks of scheduler.type={config.scheduler.type} cannot be replayed, only those of one machine; "
                "the stored batches are intact"
            )
        self._config.scheduler.threads = self._threads(self.span.start + 1)
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="areal-replay-")))
        cluster = stack.enter_context(Cluster(config.scheduler, logs, [self._model]))
        cluster.reserve(rank_asks(config.actor))
        return cluster

    def _check_start(self) -> None:
        """What is to be trained must be what the run had before the first of these steps."""
        found = self._engine.publish(self._config.rollout.dtype).digest
        start = self.span.start
        if start:
            expected: str | None = self._steps[start].digest if start in self._steps else None
            what = f"the checkpoint of step {start}"
        else:
            expected, what = self._reported(0), f"the model {self._config.actor.path}"
        if expected is not None and found != expected:
            other = [step for step in self._checkpoints if step > start]
            remedy = f"begin from another checkpoint: --from {other[0]}" if other else "put back what it was"
            raise ArealError(f"{what} has other weights than the run had ({found}, not {expected}); {remedy}")

    def _reported(self, version: int) -> str | None:
        """The digest that engines had with a version, as the batches trained soon after it say; None = they do not."""
        for step in range(version + 1, min(version + 1 + SEEN_STEPS, self.span.last + 1)):
            for group in self._store.batch(step) or ():
                if version in group.digests:
                    return group.digests[version]
        return None

    def _prepare(self, step: int) -> list[str]:
        """Compute as the session of a step did; returns what of this machine is not as it was."""
        threads = self._threads(step)
        if not self._config.actor.backend:
            torch.set_num_threads(threads)
        else:  # ranks keep the number that they were started with
            threads = self._threads(self.span.start + 1)
        here = {**self._facts, "threads": threads}
        reasons = differences(self._session(step), here) + self._rebuilt(step)
        if here["device"] != "cpu":
            reasons.append(f"device: {here['device']} adds up in another order each time")
        return reasons

    def _threads(self, step: int) -> int:
        """The run's own, so that its bits can be the same on a machine with another number of cores."""
        return int(self._given_threads or self._session(step).get("threads") or threads_of_learner(self._config))

    def _session(self, step: int) -> Mapping[str, Any]:
        """The machine that a step was taken on."""
        machines = [each["machine"] for each in self._sessions if each["first_step"] < step]
        return machines[-1] if machines else {}

    def _rebuilt(self, step: int) -> list[str]:
        """A session that begins here may have gone on from other weights than the step before led to.

        It rebuilt them from a checkpoint and stored batches, which on another machine gives nearly the same.
        """
        if step - 1 not in self._steps or all(each["first_step"] != step - 1 for each in self._sessions):
            return []
        published = [each["detail"] for each in self._store.events("published")]
        began_with = {each["digest"] for each in published if each["version"] == step - 1}
        if not began_with - {self._steps[step - 1].digest}:
            return []
        return [f"the session after step {step - 1} went on from weights that it had rebuilt on another machine"]


@dataclass
class ReplayOutcome:
    """What a replay has found by now."""

    run: Path
    span: ReplaySpan
    taken: int = 0
    bit_equal: int = 0
    diverging: int = 0
    first: Taken | None = None
    """The first step that diverges."""
    equal_after: bool = False
    """A step after that one is bit-equal again."""
    other_machine: tuple[str, ...] = ()
    furthest: tuple[int, Figure] | None = None
    """The figure that is furthest from the stored one, in tolerances, and its step."""
    weights_apart: dict[int, float] = field(default_factory=dict)
    """By the step of a checkpoint, where bits are not equal."""

    def add(self, taken: Taken) -> None:
        self.taken += 1
        self.bit_equal += taken.bit_equal
        self.diverging += taken.diverges
        self.other_machine = taken.other_machine
        if self.first is not None and taken.bit_equal:
            self.equal_after = True
        if self.first is None and taken.diverges:
            self.first = taken
        for figure in taken.figures:
            if self.furthest is None or figure.apart > self.furthest[1].apart:
                self.furthest = taken.step, figure
        if taken.weights_apart is not None:
            self.weights_apart[taken.step] = taken.weights_apart

    @property
    def steps(self) -> int:
        """How many there are to take."""
        return self.span.last - self.span.start

    def lines(self) -> list[str]:
        """The verdict, and what it rests on."""
        begun = f" (steps {self.span.start + 1} to {self.span.last})" if self.span.start else ""
        verdict = f"{self.bit_equal} of {self.steps} steps bit-equal{begun}"
        lines = []
        if self.first is not None:
            lines.append(f"step {self.first.step} diverges: {self.first.describe()}")
            if self.equal_after and self.first.cause == "weights":
                lines.append("later steps are bit-equal again: the digest of that step was altered in the store")
        if self.other_machine:
            lines += self._tolerance_lines()
        return [verdict, *lines]

    def _tolerance_lines(self) -> list[str]:
        lines = [f"bits need not be equal here: {'; '.join(self.other_machine)}"]
        if self.bit_equal == self.taken:
            return lines
        within = self.taken - self.diverging
        lines.append(
            f"{within} of {self.steps} steps within the tolerance: figures ± {RELATIVE:.0%} ± {ABSOLUTE:g}, weights "
            f"within {WEIGHTS_APART:.0%} of how far training has moved them"
        )
        if self.furthest is not None:
            step, figure = self.furthest
            lines.append(f"furthest figure: {figure.name} of step {step}, {figure.found}, was {figure.stored}")
        for step, apart in self.weights_apart.items():
            lines.append(f"weights at the checkpoint of step {step}: {apart:.1%} apart")
        return lines

    def as_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "run": str(self.run),
            "first_step": self.span.start + 1,
            "last_step": self.span.last,
            "steps": self.steps,
            "taken": self.taken,
            "bit_equal": self.bit_equal,
            "diverging": self.diverging,
            "mode": "tolerance" if self.other_machine else "bits",
            "other_machine": list(self.other_machine),
            "tolerance": {"relative": RELATIVE, "absolute": ABSOLUTE, "weights": WEIGHTS_APART},
            "furthest_figure": None
            if self.furthest is None
            else {"step": self.furthest[0], **asdict(self.furthest[1])},
            "weights_apart": self.weights_apart,
            "divergence": None if first is None else {**asdict(first), "cause": first.cause, "text": first.describe()},
            "note": self.span.note,
        }


def _places(altered: Sequence[Altered]) -> str:
    named = [
        "which groups it has, or their order" if each.task_id is None else f"{each.field} of task {each.task_id}"
        for each in altered[:SHOWN]
    ]
    more = f" and {len(altered) - SHOWN} more" if len(altered) > SHOWN else ""
    return f"{', '.join(named)}{more}"


def step_metrics(store: StoreReader, step: int) -> dict[str, Any]:
    """The line of metrics of a step, not that of an evaluation after it."""
    return next((row for row in store.metrics(step) if "episodes" in row), {})


def stored_config(store: StoreReader) -> dict[str, Any]:
    """The settings of a run as plain values, those of its last session. Raises ArealError if it had no rollouts."""
    values: dict[str, Any] = store.meta().get("config", {})
    if "rollout" not in values:
        raise ArealError(
            f"the run {store.path.parent} has not sampled anything; only runs of PPO and GRPO are replayed"
        )
    return values


def learning_config(values: Mapping[str, Any]) -> PPOConfig:
    """The part of a run's settings that learning needs; the rest may need what only the run had, such as secrets."""
    others = {name: values[name] for name in ("gconfig", "scheduler", "train_dataset", "total_train_steps")}
    return build(PPOConfig, {**learning_settings(values), **others})


def find_span(store: StoreReader, checkpoints: Mapping[int, Path], start: int | None) -> ReplaySpan:
    """The last steps that can be replayed, from the earliest weights that there are, or from `start`."""
    steps = {each.step for each in store.steps()}
    run = store.path.parent
    if not steps:
        raise ArealError(f"the run {run} has not taken a step yet; there is nothing to replay")
    last = before = max(steps)
    while before in steps and store.keeps_batch(before):
        before -= 1
    why = f"the tokens of steps up to {before} are not kept (store.keep_tokens)"
    changed = settings_changed_after(store.sessions())
    if before < changed < last:
        before, why = changed, f"the settings were others up to step {changed}"
    possible = [step for step in (0, *checkpoints) if before <= step < last]
    if start is not None and start not in possible:
        known = ", ".join(map(str, possible)) or "none"
        raise ArealError(
            f"--from must be 0 or the step of a checkpoint that can be replayed from, got {start}: {known}"
        )
    if not possible:
        raise ArealError(f"{run} cannot be replayed: {why}, and no checkpoint from there to step {last - 1} is kept")
    begun = possible[0] if start is None else start
    note = f"{why}; it begins from the checkpoint of step {begun}" if before and start is None else ""
    return ReplaySpan(begun, last, checkpoints.get(begun), note)


def settings_changed_after(sessions: Sequence[Mapping[str, Any]]) -> int:
    """The last step before a session that learns otherwise than the one before it; 0 = all learn alike."""
    known = [(each["first_step"], each["machine"].get("settings")) for each in sessions]
    return max((now[0] for then, now in pairwise(known) if then[1] != now[1]), default=0)


def first_difference(weights: WeightUpdate, checkpoint: Path) -> TensorDifference | None:
    """Where published weights are not a checkpoint's; None if they are the same as far as can be seen."""
    for name, ours, saved in _compared(weights, checkpoint):
        different = int((ours != saved).sum())
        if different:
            return TensorDifference(name, ours.numel(), different, float((ours - saved).abs().max()))
    return None


def distance(weights: WeightUpdate, checkpoint: Path, before: Path) -> float:
    """How far published weights are from a checkpoint's, as a share of how far these are from those `before`."""
    began = dict(_weights(before))
    apart = moved = 0.0
    for name, ours, saved in _compared(weights, checkpoint):
        if name not in began:  # of an adapter that was new: its B was 0, and its A is not written down
            if ".lora_B." not in name:
                continue
            began[name] = torch.zeros_like(saved)
        apart += float((ours - saved).double().square().sum())
        moved += float((saved - began[name].to(saved.dtype)).double().square().sum())
    return math.sqrt(apart / moved) if moved else (math.inf if apart else 0.0)


def _compared(weights: WeightUpdate, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each tensor as it is published and as it was saved, in the order of the model."""
    published, _ = WeightReader().open(weights)
    for name, saved in _weights(checkpoint):
        if name in published:
            ours = published[name]
            yield name, ours, saved.detach().to(ours.dtype)


def _weights(directory: Path) -> NamedTensors:
    if is_adapter(directory):
        return open_adapter(directory).tensors.items()
    return open_trainable(directory, device="cpu", frozen=True).named_weights()


def finite(value: float) -> float | None:
    """As a line of metrics has it."""
    return value if math.isfinite(value) else None
