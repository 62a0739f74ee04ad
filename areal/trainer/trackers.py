"""The figures of a run on W&B, MLflow, Trackio or SwanLab: `tracker: wandb`.

Each tracker has a thread of its own, so one that is slow or cannot be reached holds up nothing, and one that fails is
warned of once and left out until the run is started again. RUN/trackers/NAME.json keeps which run of the tracker this
is and what it has been sent. A resumed run goes on with that run, and sends from the store what is missing.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.messages import Episode, GroupResult
from areal.config.experiment import ExperimentConfig
from areal.store.reader import StoreReader
from areal.trainer.run_directory import without_secrets, write_atomically
from areal.trainer.tracker_kinds import KINDS, RunTracker, TrackedRun
from areal.utils.closing import Closing
from areal.utils.logging import getLogger
from areal.utils.shorten import first_line

DIRECTORY = "trackers"
COLUMNS = ["step", "task", "reward", "transcript"]
CLOSE_SECONDS = 60.0
"""How long the end of a run waits until its trackers have sent everything, all together."""
MOST_WAITING = 10_000
"""Figures and tables of this run that wait for a slow tracker; further figures are sent when the run is resumed."""

Key = tuple[int, int]
"""Of a line of metrics: its step, and its place among those of that step."""

logger = getLogger("trainer")


class Trackers(Closing):
    """All trackers of a run; none of its methods waits or raises."""

    def __init__(self, config: ExperimentConfig, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._settings = config.tracking
        directory = run_dir / DIRECTORY
        directory.mkdir(exist_ok=True)
        run = TrackedRun(
            config.tracking.project or config.experiment_name,
            config.tracking.name or run_dir.name,
            config.tracking.offline,
            directory,
            {name: value for name, value in _flat(without_secrets(config)) if value is not None},
        )
        self._senders = [_Sender(name, run) for name in config.trackers]

    def catch_up(self, last_step: int) -> None:
        """Send what the store has up to that step and trackers have not."""
        first = min(sender.queued[0] for sender in self._senders)
        with StoreReader(self._run_dir) as store:
            for row in store.metrics(first_step=max(0, first)):
                if row["step"] <= last_step:
                    self._send(row["step"], row, None)

    def figures(self, step: int, values: Mapping[str, float | None]) -> None:
        """A line of metrics; what a tracker has been sent is not sent again."""
        self._send(step, values, MOST_WAITING)

    def _send(self, step: int, values: Mapping[str, float | None], most_waiting: int | None) -> None:
        known = {name: float(value) for name, value in values.items() if value is not None and name != "step"}
        for sender in self._senders:
            sender.figures((step, _place(known)), known, most_waiting)

    def rollouts(self, step: int, groups: Sequence[GroupResult]) -> None:
        """A few conversations of a step, if it is one whose conversations are shown."""
        every = self._settings.rollouts_every
        if every is None or (step - 1) % every:
            return
        chosen = [(group.task_id, episode) for group in groups for episode in group.episodes][: self._settings.rollouts]
        rows = [[step, task_id, float(episode.reward), _text(episode)] for task_id, episode in chosen]
        for sender in self._senders:
            sender.table(step, rows)

    def close(self) -> None:
        for sender in self._senders:
            sender.ask_to_end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.wait_for_end(deadline)


@dataclass(frozen=True)
class _Row:
    """Something to send; `key` None = it is not looked for in the store."""

    send: Callable[[RunTracker], None]
    key: Key | None = None


class _Sender:
    """The thread of one tracker."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name = name
        self._run = run
        self._state = run.directory / f"{name}.json"
        self._id, self.queued = self._kept()
        """What is sent, or waits to be."""
        self._waiting: queue.Queue[_Row | None] = queue.Queue()
        self._failed = threading.Event()
        self._is_behind = False
        """Figures had no place in the queue: later ones are left to the next start too, which looks for what follows
        the last that was sent."""
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def figures(self, key: Key, values: Mapping[str, float], most_waiting: int | None) -> None:
        if key <= self.queued or self._is_behind or self._failed.is_set():
            return
        if most_waiting is not None and self._waiting.qsize() >= most_waiting:
            self._is_behind = True
            text = "%s is %d lines of figures behind; those after step %d are sent when the run is started again"
            logger.warning(text, self._name, most_waiting, self.queued[0])
            return
        self._waiting.put(_Row(lambda tracker: tracker.figures(key[0], values), key))
        self.queued = key

    def table(self, step: int, rows: list[list[Any]]) -> None:
        if not self._failed.is_set() and self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(_Row(lambda tracker: tracker.table(step, COLUMNS, rows)))

    def ask_to_end(self) -> None:
        self._waiting.put(None)

    def wait_for_end(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s has not taken all figures in %g s; the rest is left out", self._name, CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            tracker = KINDS[self._name](self._run, self._id)
            try:
                self._id = tracker.id
                while (row := self._waiting.get()) is not None:
                    row.send(tracker)
                    if row.key is not None:
                        self._keep(row.key)
            finally:
                tracker.finish()
        except (Exception, SystemExit) as error:  # whatever a library raises must not end the run
            self._failed.set()
            logger.warning(
                "tracker %s fails (%s: %s); the run goes on without it, and metrics.jsonl has everything",
                self._name,
                type(error).__name__,
                first_line(error),
            )

    def _kept(self) -> tuple[str | None, Key]:
        """The tracker's name for the run, and what it has been sent."""
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            return str(state["id"]), (int(state["step"]), int(state["place"]))
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or a kill has cut it off
            return None, (-1, 0)

    def _keep(self, key: Key) -> None:
        write_atomically(self._state, json.dumps({"id": self._id, "step": key[0], "place": key[1]}))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _place(values: Mapping[str, float]) -> int:
    """A step's own line comes before those of evaluations after it, of which the greedy one is last."""
    if "eval_greedy_reward" in values:
        return 2
    return 1 if any(name.startswith("eval_") for name in values) else 0


def _text(episode: Episode) -> str:
    """A conversation as a person reads it."""
    parts = []
    for message in episode.messages:
        calls = [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
        parts.append("\n".join([f"[{message.get('role', '')}]", str(message.get("content") or ""), *calls]))
    return "\n\n".join(parts)
