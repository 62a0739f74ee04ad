"""What every training run does around its steps: resume, save, stop in order on Ctrl-C, and leave a summary.

`TrainingWork` does the work of a trainer. It finds the model, takes the run's directory and opens the rest
(`RunParts`). `TrainingRun` is one run on these parts; PPO and SFT each say what a step is (`ppo.py`, `sft.py`).
"""

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from areal.api.errors import RanksLost, RunExists
from areal.api.messages import RANK_ROLE
from areal.config.experiment import ExperimentConfig
from areal.engine.model.device import find_device
from areal.engine.models import find_model
from areal.engine.training.learner import Critic, Learner
from areal.infra.scheduler import Ask
from areal.store.reader import StoreReader
from areal.store.schema import FAILED, STORE_FILE, StoreError, StoreGone
from areal.store.writer import StoreWriter
from areal.trainer import display, notices
from areal.trainer.checkpoint import NoRoom, begin_checkpoint, checkpoint_digest, load_newest
from areal.trainer.cluster import Cluster
from areal.trainer.display import Announcer, Progress
from areal.trainer.learners import open_learner, settings_digest, threads_of_learner
from areal.trainer.machine import machine_facts
from areal.trainer.processes import OnEvent, RestartBudget
from areal.trainer.ranks import rank_asks
from areal.trainer.resume import Standing, find_standing
from areal.trainer.run_directory import RunDirectory, explained_storage_errors, without_secrets
from areal.trainer.status import RunStatus
from areal.trainer.tasks import digest_of_tasks
from areal.trainer.trainers import check_ranks, check_trackers
from areal.trainer.viewing import RunViewer
from areal.utils import garbage, waits
from areal.utils.closing import Closing
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.shorten import first_line
from areal.utils.waits import Waits

if TYPE_CHECKING:
    from areal.trainer.exporter import Exporter
    from areal.trainer.fleet import Fleet
    from areal.trainer.trackers import Trackers

UNKEPT = {"critic.path": None, "teacher.path": None, "actor.lora": None}
"""What runs had before their checkpoints kept it."""
SAVE_SECONDS = 3600.0
"""How long a checkpoint may take to be written while training goes on: as long as a call of ranks may."""
RETRY_SECONDS = 2.0
"""Between two looks whether a full disk has room again."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class TrainResult:
    run_dir: Path
    model_dir: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class RunParts:
    """What a run of either kind works with."""

    directory: RunDirectory
    engine: Learner
    """With the weights and the optimizer of the newest checkpoint, if there is one."""
    tokenizer: Any
    total_steps: int
    store: StoreWriter
    standing: Standing
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """The settings that a checkpoint keeps, to be compared when it is resumed."""
    cluster: Cluster | None = None
    """The processes of the run, if ranks are among them."""
    critic: Critic | None = None
    """The value model beside the policy, restored as the engine is."""
    exporter: "Exporter | None" = None
    """What shows the run to Prometheus, if metrics.port is set."""
    trackers: "Trackers | None" = None
    """Where figures are sent, if a tracker is set."""
    status: RunStatus | None = None
    """What tells people why nothing happens; None = nothing does."""
    kept: bool = True
    """As `TrainingWork.kept`."""

    def showing(self, fleet: "Fleet") -> AbstractContextManager[None]:
        """Show what the fleet does, until the end of the block, if anything is shown."""
        return nullcontext() if self.exporter is None else self.exporter.watching(fleet.cluster, fleet)


class TrainingWork(Closing):
    value_head: ClassVar[bool] = False
    """The model gives scores in place of log-probs."""
    kept: ClassVar[bool] = True
    """The run's directory stays. One that its maker removes needs no last checkpoint, and nobody is sent there."""

    def __init__(self, config: ExperimentConfig, tasks: list[dict[str, Any]]) -> None:
        """A built-in model is made now unless the cache has it."""
        self.config = config
        check_ranks(config)
        check_trackers(config)
        if not (config.actor.backend and config.scheduler.type != "local"):  # else the ranks' machines are others
            find_device(config.actor.device, "actor.device")
        self._tasks = tasks
        self._total_steps = config.total_steps(len(tasks))
        with Announcer(quiet=config.quiet) as report:
            self._model = find_model(config.actor.path, report)
        own = config.tokenizer_path in ("", config.actor.path)
        self._tokenizer_dir = self._model if own else find_model(config.tokenizer_path)
        self._directory: RunDirectory | None = None
        self._exporter: Exporter | None = None
        """It stays when ranks are lost and the run goes on."""
        self._trackers: Trackers | None = None
        """They do as well."""
        self._status: RunStatus | None = None
        """So does this."""
        self._viewer: RunViewer | None = None
        """And this."""

    def close(self) -> None:
        """Let another process have the run's directory."""
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None
        if self._viewer is not None:
            self._viewer.close()
            self._viewer = None
        if self._status is not None:
            self._status.close()
            self._status = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    @contextmanager
    def _open_run(self, optimizer_steps: int) -> Iterator[RunParts]:
        """Take the directory and load the newest checkpoint; `optimizer_steps` are those of the whole run."""
        directory = self._directory = self._directory or RunDirectory.open(self.config)
        if self.config.metrics.port is not None and self._exporter is None:
            from areal.trainer.exporter import Exporter  # it loads what answers HTTP requests

            self._exporter = Exporter(self.config, directory, self._total_steps)
            self._note(f"metrics for Prometheus at {self._exporter.url}")
        with ExitStack() as stack:
            stack.enter_context(explained_storage_errors(directory.path))
            address = self.config.scheduler.address
            status = self._status = self._status or RunStatus(directory.path, self._total_steps, address)
            stack.enter_context(waits.of(status.trainer))
            checkpoints, fingerprint = directory.checkpoints(), self._fingerprint()
            store = stack.enter_context(self._open_store(directory, fingerprint, saved=bool(checkpoints)))
            cluster = (
                stack.enter_context(self._open_cluster(directory.logs, store)) if self.config.actor.backend else None
            )
            engine = stack.enter_context(
                closing(open_learner(self.config, self._model, optimizer_steps, cluster, value_head=self.value_head))
            )
            critic = self._open_critic(engine, optimizer_steps)
            state, notes = load_newest(checkpoints, engine, critic) if checkpoints else ({"step": 0}, [])
            for note in notes:
                display.say(note)
            if checkpoints and self.config.recover.mode != "force":
                _refuse_changes(directory.path, {**UNKEPT, **state.get("fingerprint", {})}, fingerprint)
            standing = find_standing(store, state)
            for note in standing.notes:
                display.say(note)
            shown = self.config.viewer
            if shown.port is not None and self._viewer is None:
                self._viewer = RunViewer(directory.path, shown.host, shown.port, self._note)
            values = without_secrets(self.config)
            store.set_meta({"fingerprint": fingerprint, "config": values, **self._meta()})
            store.session(standing.step, {**self._machine(), "settings": settings_digest(values, self._total_steps)})
            directory.write_config(self.config)
            if self.config.trackers and self._trackers is None:
                from areal.trainer.trackers import Trackers  # few runs need it

                self._trackers = Trackers(self.config, directory.path)
            parts = RunParts(
                directory,
                engine,
                load_hf_tokenizer(self._tokenizer_dir),
                self._total_steps,
                store,
                standing,
                fingerprint,
                cluster,
                critic,
                self._exporter,
                self._trackers,
                status,
                self.kept,
            )
            if parts.exporter is not None:
                parts.exporter.begin(standing.step)
                if cluster is not None:
                    stack.enter_context(parts.exporter.watching(cluster))
            yield parts

    def _note(self, text: str) -> None:
        """Say what a quiet run leaves out."""
        if not self.config.quiet:
            display.say(text)

    def _hello(self, parts: RunParts) -> list[str]:
        """What is said at the start; a viewer that is served says its address itself."""
        if not self.kept:
            return []
        return notices.hello(parts.directory.path, parts.standing.step, served=self._viewer is not None)

    def _fingerprint(self) -> dict[str, Any]:
        """What fixes the tasks of each step; a resumed run must have the same."""
        dataset, lora = self.config.train_dataset, self.config.actor.lora
        adapter = None if lora.rank is None else [lora.rank, lora.scaled_alpha, *lora.targets]
        return {
            "actor.lora": adapter,
            "seed": self.config.seed,
            "train_dataset.shuffle": dataset.shuffle,
            "train_dataset.batch_size": dataset.batch_size,
            "train_dataset": f"{len(self._tasks)} tasks ({digest_of_tasks(self._tasks)})",
        }

    def _machine(self) -> dict[str, Any]:
        """What of the machine decides the bits of the run."""
        return machine_facts(self.config.actor.device, threads_of_learner(self.config))

    def _meta(self) -> dict[str, Any]:
        """What else the store keeps for the whole run."""
        return {"total_steps": self._total_steps}

    def _open_store(self, directory: RunDirectory, fingerprint: dict[str, Any], *, saved: bool) -> StoreWriter:
        """One of other settings is refused, or, if nothing has been trained with them, begun anew."""
        store = self._make_store(directory.path)
        if self.config.recover.mode == "force":
            return store
        try:
            with StoreReader(directory.path) as reader:
                before, has_steps = reader.meta().get("fingerprint", {}), bool(reader.steps())
            if saved and before:  # the rest is compared with the checkpoint; one of another kind could not be read
                _refuse_changes(directory.path, {**UNKEPT, **before}, {"actor.lora": fingerprint["actor.lora"]})
            elif has_steps:
                _refuse_changes(directory.path, before, fingerprint)
        except BaseException:
            store.close()
            raise
        if saved or has_steps or before in ({}, fingerprint):
            return store
        store.close()
        for path in directory.path.glob(f"{STORE_FILE}*"):
            path.unlink()
        return self._make_store(directory.path)

    def _make_store(self, directory: Path) -> StoreWriter:
        config = self.config.store
        return StoreWriter(
            directory,
            say=display.say,
            patience_seconds=config.full_disk_seconds,
            keep_tokens=config.steps_with_tokens,
        )

    def _open_critic(self, engine: Learner, optimizer_steps: int) -> Critic | None:
        """The value model that is trained beside the policy."""
        return None

    def _asks(self) -> list[Ask]:
        """What the processes of a run with ranks need of their hosts."""
        return rank_asks(self.config.actor)

    def _open_cluster(self, logs: Path, store: StoreWriter) -> Cluster:
        shipped = [self._model, self._tokenizer_dir]
        cluster = Cluster(self.config.scheduler, logs, shipped, events_to(store))
        assert self._status is not None, "the run is being opened"
        self._status.watch(cluster)
        try:
            cluster.reserve(self._asks())
        except BaseException:
            cluster.close()
            raise
        return cluster

    def _until_no_rank_is_lost(self, attempt: Callable[[], TrainResult]) -> TrainResult:
        """Ranks die together. The run then goes on from its newest checkpoint, as it would if it were started again."""
        budget = RestartBudget(self.config.scheduler.max_restarts)
        while True:
            try:
                return attempt()
            except RanksLost as lost:
                if not budget.spend():
                    raise
                display.say(f"{lost}; the run goes on from its newest checkpoint and its store")
                if self._exporter is not None:
                    self._exporter.restarted(RANK_ROLE)


def events_to(store: StoreWriter) -> OnEvent:
    """What writes events down. If that is not possible, others will say so."""

    def on_event(kind: str, detail: Mapping[str, Any]) -> None:
        with suppress(StoreError):
            store.event(kind, detail)

    return on_event


def _refuse_changes(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """What is not in `before` is from before it was kept."""
    changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if changed:
        raise RunExists(
            f"the run {path} cannot go on as it began: {', '.join(changed)}; give the old values, choose another "
            "trial_name, or set recover.mode=force to go on with the new ones"
        )


class TrainingRun(ABC):
    def __init__(
        self,
        config: ExperimentConfig,
        parts: RunParts,
        progress: Progress,
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_interrupt` as in `Interruption`."""
        self._saver = config.saver
        self._full_disk_seconds = config.store.full_disk_seconds
        self._directory = parts.directory
        self._kept = parts.kept
        self._engine = parts.engine
        self._critic = parts.critic
        self._tokenizer = parts.tokenizer
        self._total_steps = parts.total_steps
        self._progress = progress
        self._fingerprint = parts.fingerprint
        self._store = parts.store
        self._step: int = parts.standing.saved_step
        """Steps taken so far, in earlier sessions too."""
        self._between_steps = False
        """The weights are not those of `_step`: there is a step that is not written down yet."""
        self._interruption = Interruption(on_interrupt)
        self._status = parts.status
        if parts.status is not None:
            parts.status.follow(lambda: self._step, progress.say)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[Any] | None = None
        """A checkpoint that is being written."""
        self._waits_for_room = True
        """A full disk is waited for; not once the run ends."""

    def execute(self) -> TrainResult:
        """Train to the last step. Whatever ends a run after its first step, it saves.

        Ctrl-C becomes a KeyboardInterrupt and SIGTERM a SystemExit.
        """
        try:
            with self._interruption, garbage.settled():
                self._train()
            return self._finish()
        except Interrupted:
            self._stop_as_asked()
            raise self._interruption.ending() from None
        except RanksLost:  # and with them what could be saved
            self._let_saving_end()
            raise
        except StoreGone:  # which had the steps since the checkpoint: not everything is saved
            self._let_saving_end()
            self._progress.close()
            raise
        except Exception as error:
            with suppress(StoreError):  # then others cannot be told
                self._store.event(FAILED, {"error": f"{type(error).__name__}: {first_line(error)}"})
            if self._step:
                self._stop()
            raise

    @abstractmethod
    def _train(self) -> None:
        """Take all the steps that are left, counting each in `_step`, and check `_interruption` after each."""

    @abstractmethod
    def _summary(self) -> dict[str, Any]:
        """The result, for summary.json."""

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps in addition to the engine and the step."""
        return {}

    def _result_lines(self, summary: dict[str, Any]) -> list[str]:
        """What is printed about the run at the end."""
        return []

    def _verdicts(self, summary: dict[str, Any]) -> list[str]:
        """What a quiet run prints too: how well it went."""
        return []

    def _places(self, model: Path, curve: Path | None) -> list[str]:
        """What is printed about where things are."""
        return notices.places(self._directory.path, model, curve)

    def _draw_curve(self) -> Path | None:
        """Draw the reward curve, if the run has one; returns where it is."""
        return None

    def _due(self, freq_steps: int | None) -> bool:
        return freq_steps is not None and self._step % freq_steps == 0 and self._step < self._total_steps

    def _save(self) -> Path:
        """Write a checkpoint, or begin to: training goes on meanwhile if it can (`_wait_until_saved`)."""
        try:
            self._wait_until_saved()
        except NoRoom as error:  # the one that is written now makes up for it
            self._progress.say(str(error))
        self._with_room(self._begin_saving)
        return self._directory.checkpoint(self._step)

    def _save_now(self) -> Path:
        """Write a checkpoint; it is complete when this returns."""

        def save() -> None:
            self._begin_saving()
            self._wait_until_saved()

        target = self._save()
        try:
            self._wait_until_saved()
        except NoRoom:
            self._with_room(save)
        return target

    def _save_if_possible(self) -> None:
        """The run ends, and must not end with this error instead of its own, nor wait for room once more."""
        self._waits_for_room = False
        try:
            self._save_now()
        except NoRoom as error:
            self._progress.say(str(error))

    def _begin_saving(self) -> None:
        target = self._directory.checkpoint(self._step)
        state = {"step": self._step, "fingerprint": self._fingerprint, **self._state()}
        with waits.current().entered(f"writes the checkpoint of step {self._step}"):
            finish = begin_checkpoint(target, self._engine, self._tokenizer, state, self._critic)
        if finish is None:
            self._keep_checkpoint(self._step)
        else:
            self._saving = self._thread.submit(self._finish_checkpoint, self._step, finish)

    def _with_room(self, write: Callable[[], None]) -> None:
        """Wait for room on a full disk, until the patience ends or somebody asks the run to end."""
        until: float | None = None
        while True:
            try:
                write()
            except NoRoom as error:
                if not self._waits_for_room or self._interruption.asked:
                    raise
                now = time.monotonic()
                if until is None:
                    until = now + self._full_disk_seconds
                    self._progress.say(f"{error}; the run waits for up to {self._full_disk_seconds:g} s")
                if now >= until:
                    raise
                with waits.current().entered("waits for room on a full disk", until - now):
                    time.sleep(min(RETRY_SECONDS, until - now))  # nothing announces it
            else:
                break
        if until is not None:
            self._progress.say("there is room again; the run goes on")

    def _finish_checkpoint(self, step: int, finish: Callable[[], None]) -> None:
        saving = Waits() if self._status is None else self._status.saving
        with saving.entered(f"of step {step} is being written", SAVE_SECONDS):
            finish()
        self._keep_checkpoint(step)

    def _keep_checkpoint(self, step: int) -> None:
        complete = self._directory.checkpoint(step)
        self._store.checkpoint(step, complete.name, checkpoint_digest(complete))
        self._directory.note_saved()
        self._store.checkpoints_removed(before_step=self._directory.prune(self._saver.keep))

    def _wait_until_saved(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with waits.current().entered("waits until the checkpoint before is written", SAVE_SECONDS):
            saving.result(SAVE_SECONDS)

    def _let_saving_end(self) -> None:
        """A checkpoint whose ranks are lost fails, or is whole: nothing of it is written once the run has gone on."""
        if self._saving is not None:
            wait([self._saving], SAVE_SECONDS)

    def _stop_as_asked(self) -> None:
        """Whatever ends a job may end its ranks too, and it is over then."""
        try:
            self._stop()
        except (Interrupted, RanksLost) as error:  # calls of a cluster raise the former once the run was asked to end
            self._let_saving_end()
            self._progress.close()
            why = first_line(error.__cause__ or error)
            self._progress.say(f"step {self._step} could not be saved: {why}; older checkpoints are intact")

    def _stop(self) -> None:
        """End before the last step, with everything saved."""
        if not self._kept:
            self._let_saving_end()
            self._progress.close()
            return
        if self._step:
            if self._between_steps:  # the store has what is needed to go on from the step before
                self._wait_until_saved()
            else:
                self._save_if_possible()
            self._draw_curve()
        self._progress.close()
        self._progress.say(notices.stopped(self._directory.path, self._step, self._total_steps))

    def _finish(self) -> TrainResult:
        summary = {"steps": self._step, **self._summary(), **self._store_figures()}
        model, curve = self._save_now(), self._draw_curve()
        self._directory.finish(summary)
        self._progress.close()
        if lines := self._result_lines(summary):
            self._progress.note("\n".join(lines))
        self._progress.say("\n".join([*self._verdicts(summary), f"run         {self._directory.path}"]))
        self._progress.note("\n".join(self._places(model, curve)))
        return TrainResult(self._directory.path, model, summary)

    def _store_figures(self) -> dict[str, float]:
        """The size of the store, and what a trained token takes of it."""
        self._store.flush()
        with StoreReader(self._directory.path) as reader:
            size, tokens = reader.bytes(), reader.trained_tokens()
        return {"store_bytes": size, **({"store_bytes_per_token": size / tokens} if tokens else {})}


class Interrupted(Exception):
    """The user asked the run to end, with everything saved."""


class Interruption:
    """While entered, the first Ctrl-C or SIGTERM asks the run to end in order, and a second one ends it at once."""

    def __init__(self, on_interrupt: Callable[[], None] = lambda: None) -> None:
        """`on_interrupt` is called at the first of them; it must be safe inside a signal handler."""
        self._on_interrupt = on_interrupt
        self._asked: int | None = None
        """The signal that asked."""
        # Python delivers signals to the main thread only, and only that thread may choose what they do.
        self._works = threading.current_thread() is threading.main_thread()
        self._previous: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raise `Interrupted` if a signal has asked for the end."""
        if self.asked:
            raise Interrupted

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end."""
        return self._asked is not None

    def ending(self) -> BaseException:
        """What ends a process as that signal does, with its exit code."""
        return SystemExit(128 + signal.SIGTERM) if self._asked == signal.SIGTERM else KeyboardInterrupt()

    def __enter__(self) -> "Interruption":
        if self._works:
            self._previous = {number: signal.signal(number, self._on_signal) for number in ENDING_SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = number
        self._on_interrupt()
