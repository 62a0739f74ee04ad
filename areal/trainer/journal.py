"""The record of a PPO run: figures and conversations of each step, held-out evaluations, the curve, the summary.

All of it is committed to the run's store first, and then shown and exported. A resumed run continues its journal:
counts and seconds go on, and what was measured is read back instead of being measured again.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.api.engine_api import WeightUpdate
from areal.api.errors import ArealError
from areal.api.messages import Episode, GroupResult, TrainedRow
from areal.config.loader import build
from areal.rollout.pipeline import Tally
from areal.store.reader import StoreReader
from areal.store.records import StepRecord
from areal.store.writer import StoreWriter
from areal.trainer.curve import draw_reward_curve
from areal.trainer.display import Progress
from areal.trainer.evaluation import Difference, Evaluation, greedy_verdict, verdict
from areal.trainer.logs import MetricsLog, RolloutLog, finite, read_metrics
from areal.trainer.run_directory import RunDirectory, write_atomically
from areal.trainer.transcript import Transcript
from areal.trainer.update_figures import group_figures, sampled_tokens
from areal.utils.closing import Closing
from areal.utils.conversation import expected_of
from areal.utils.logging import getLogger
from areal.utils.stats_tracker import DROPPED, MAX_NAME_CHARACTERS, MAX_NAMES

if TYPE_CHECKING:  # loaded by runs that need it
    from areal.trainer.exporter import Exporter
    from areal.trainer.trackers import Trackers

BEFORE, DURING, AFTER = "before", "during", "after"
"""When an evaluation is made: before the first step, between two, after the last."""

EVALUATIONS = ("eval_reward", "eval_greedy_reward")
"""How the figures of an evaluation begin, sampled and greedy."""
Figures = dict[str, float | None]
"""A line of metrics without its step; None = not finite."""
RATE_STEPS = 10
"""Tokens per second are taken over this many steps, because single steps are bursty."""
MAX_FIGURES = 512
"""Different names in the metrics of a run; what user code records under further ones is dropped."""

NOTHING = Tally()

logger = getLogger("trainer")


@dataclass
class Account:
    """Totals of a run, over all its sessions; every step and every checkpoint keeps them."""

    seconds: float = 0.0
    """From the first evaluation on."""
    calls: int = 0
    max_logprob_difference: float | None = None
    """The largest between the engine's log-probs and the trainer's; None = no token could be compared yet."""
    expiring_wait_seconds: float = 0.0
    """For how long batches waited for groups that were about to become too old."""
    trained: Tally = NOTHING
    dropped: Tally = NOTHING
    """Groups that were sampled and became too old to be trained."""


class Journal(Closing):
    def __init__(
        self,
        directory: RunDirectory,
        store: StoreWriter,
        total_steps: int,
        first_step: int,
        account: Account,
        exporter: "Exporter | None" = None,
        trackers: "Trackers | None" = None,
        *,
        saved_step: int = 0,
        quiet: bool = False,
    ) -> None:
        """`first_step` steps have been taken, of which a checkpoint has `saved_step`. `quiet` as in `Progress`."""
        self._directory = directory
        self._store = store
        self._total_steps = total_steps
        self._account = account
        self._began = time.monotonic() - account.seconds
        self._rate = TokenRate()
        with StoreReader(directory.path) as reader:
            stored = reader.evaluations()
        self._evaluated = {each["step"] for each in stored if each["when"] == DURING}
        """Steps after which there was an evaluation."""
        known = {each["key"]: build(Evaluation, each["result"]) for each in stored if each["when"] != DURING}
        self._evaluations = known or _read_evaluations(directory.held_out)
        if known:
            self._export_evaluations()
        self._trackers = trackers
        self._stack = ExitStack()
        self.progress = self._stack.enter_context(Progress(total_steps, first_step, quiet=quiet))
        self._metrics = self._stack.enter_context(
            MetricsLog(directory.path, first_step, exporter, board_from=saved_step, trackers=trackers)
        )
        self._rollouts = self._stack.enter_context(RolloutLog(directory.path, first_step))
        before = read_metrics(directory.path)
        self.progress.recall(before)
        self._recorded = _Recorded({name for row in before for name in row})

    def close(self) -> None:
        self._stack.close()

    def start_clock(self) -> None:
        """Training begins now."""
        self._began = time.monotonic() - self._account.seconds
        self._rate = TokenRate()

    @property
    def account(self) -> Account:
        """The totals up to now."""
        return replace(self._account, seconds=self._seconds)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def commit(
        self,
        step: int,
        groups: Sequence[GroupResult],
        weights: WeightUpdate,
        figures: Mapping[str, float],
        computed: Sequence[TrainedRow] = (),
        dropped: Tally = NOTHING,
    ) -> Figures:
        """A step that led to these weights has been taken; when this returns, it is in the store with its groups.

        `figures` are those of `step_figures` and whatever else is known by now; `computed` is of each row; `dropped` is
        what became too old to be trained since the step before. Returns its line of metrics.
        """
        account = self._account
        account.calls += int(figures["calls"])
        account.trained += Tally.of(groups)
        account.dropped += dropped
        account.expiring_wait_seconds += figures.get("expiring_wait_seconds", 0.0)
        if "max_logprob_difference" in figures:
            seen = figures["max_logprob_difference"]
            account.max_logprob_difference = max(account.max_logprob_difference or 0.0, seen)
        means = {f"dropped/{name}": mean for name, mean in dropped.means().items()}
        rate = self._rate.step(figures["tokens"])
        own = {**figures, **means, "tokens_per_second": rate, "store_seconds": 0.0}
        row = finite({**self._recorded.means(groups, own), **own, "time_seconds": self._seconds})
        batch = [group.task_id for group in groups]
        trained = _by_episode(groups, computed) if computed else {}
        began = time.monotonic()
        self._store.step(StepRecord(step, weights.version, weights.digest, batch, row, asdict(self.account), trained))
        return {**row, "store_seconds": time.monotonic() - began}

    def step(self, step: int, groups: Sequence[GroupResult], row: Figures) -> None:
        """Show and export a step that is committed; `row` with what has become known since."""
        self._store.complete(step, row)
        self._rollouts.write(step, [(group.task_id, episode) for group in groups for episode in group.episodes])
        self._metrics.write(step, row)
        if self._trackers is not None:
            self._trackers.rollouts(step, groups)
        self.progress.update(step, row)
        if step in (1, self._total_steps // 2, self._total_steps):
            self._show_best_and_worst(step, groups)

    def evaluation(self, step: int, when: str, results: Sequence[GroupResult], *, greedy: bool) -> None:
        evaluation = Evaluation.of(results)
        self._account.calls += sum(episode.calls for result in results for episode in result.episodes)
        key = _evaluation_key(when, greedy)
        self._evaluations[key] = evaluation
        name = EVALUATIONS[greedy]
        bounds = zip((f"{name}_low", f"{name}_high"), evaluation.interval, strict=False)
        row = finite({name: evaluation.reward, **dict(bounds), "time_seconds": self._seconds})
        detail = {"key": key, "when": when, "result": asdict(evaluation), "account": asdict(self.account)}
        self._store.evaluation(step, row, detail)
        self._metrics.write(step, row)
        self.progress.update(step, row)
        self._export_evaluations()

    def _export_evaluations(self) -> None:
        before = [_evaluation_key(BEFORE, greedy) for greedy in (False, True)]
        known = {key: asdict(each) for key, each in self._evaluations.items() if key in before}
        try:
            write_atomically(self._directory.held_out, json.dumps(known, indent=2) + "\n")
        except OSError as error:  # the store has them
            logger.warning("%s cannot be written: %s", self._directory.held_out, error.strerror)

    def has_evaluation(self, when: str, *, greedy: bool) -> bool:
        return _evaluation_key(when, greedy) in self._evaluations

    def was_evaluated(self, step: int) -> bool:
        """Whether there was an evaluation after this step, in an earlier session of the run."""
        return step in self._evaluated

    def summary(self) -> dict[str, Any]:
        account = self.account
        self._store.flush()
        with StoreReader(self._directory.path) as reader:
            size = reader.bytes()
        known = {
            **asdict(account),
            "trained": _with_means(account.trained),
            "dropped": _with_means(account.dropped),
            "calls_per_second": account.calls / account.seconds,
            "store": {"bytes": size, "cpu_seconds": self._store.cpu_seconds},
            "held_out": {key: _in_summary(evaluation) for key, evaluation in self._evaluations.items()},
        }
        for greedy in (False, True):
            keys = _evaluation_key(BEFORE, greedy), _evaluation_key(AFTER, greedy)
            if not self._evaluations.keys() >= set(keys):
                continue
            before, after = (self._evaluations[key] for key in keys)
            if difference := Difference.of(before, after):
                known["held_out"]["difference_greedy" if greedy else "difference"] = asdict(difference)
            if greedy:
                known["greedy_verdict"] = greedy_verdict(before, after)
            else:
                known["verdict"] = verdict(before, after, account.seconds)
        return known

    def draw(self) -> None:
        draw_reward_curve(read_metrics(self._directory.path), self._directory.curve)

    def _show_best_and_worst(self, step: int, groups: Sequence[GroupResult]) -> None:
        episodes = sorted(((each, group.task_id) for group in groups for each in group.episodes), key=_reward)
        with StoreReader(self._directory.path) as reader:
            shown = [(f"step {step}, lowest reward", *episodes[0]), (f"step {step}, highest reward", *episodes[-1])]
            for title, episode, task_id in shown[: len(episodes)]:
                self.progress.note(Transcript(episode, title, expected_of(reader.task(task_id))))


def _reward(of_task: tuple[Episode, int]) -> float:
    return of_task[0].reward


def _by_episode(groups: Sequence[GroupResult], computed: Sequence[TrainedRow]) -> dict[int, list[list[TrainedRow]]]:
    """What was computed for each row, group by group, as the store keeps it."""
    left = iter(computed)
    return {group.task_id: [list(islice(left, len(episode.rows))) for episode in group.episodes] for group in groups}


def _with_means(tally: Tally) -> dict[str, float]:
    """Groups and tokens, and what an episode of them is like."""
    means = {f"episode_{name}": mean for name, mean in tally.means().items()}
    return {"groups": tally.groups, "episodes": tally.episodes, "tokens": tally.tokens, **means}


def _in_summary(evaluation: Evaluation) -> dict[str, Any]:
    """Without the reward of each task, which only held_out.json keeps."""
    return {name: value for name, value in asdict(evaluation).items() if name != "task_rewards"}


def _evaluation_key(when: str, greedy: bool) -> str:
    return f"{when}_greedy" if greedy else when


def _read_evaluations(path: Path) -> dict[str, Evaluation]:
    """What a run from before there were stores knows."""
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): build(Evaluation, each, f"{key}.") for key, each in known.items()}
    except (ValueError, AttributeError, TypeError, ArealError):
        logger.warning("%s is damaged; the baseline evaluation is lost", path)
        return {}


def step_figures(groups: Sequence[GroupResult], version: int, policy: Mapping[str, float]) -> dict[str, float]:
    """Figures of a batch that was trained at `version`, together with those of the update itself."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = np.array([episode.reward for episode in episodes])
    oldest = np.array([oldest for each in episodes if (oldest := each.oldest_version) is not None])
    figures = {
        "reward": float(rewards.mean()),
        "staleness": float((version - oldest).mean()),
        "staleness_max": float((version - oldest).max()),
        "episodes": float(len(episodes)),
        "calls": float(sum(episode.calls for episode in episodes)),
        "tokens": float(sum(episode.trained_tokens for episode in episodes)),
        "episode_seconds": float(np.mean([episode.seconds for episode in episodes])),
        "truncated": float(np.mean([episode.truncated for episode in episodes])),
    }
    shares = {}
    if sampled := sampled_tokens(groups):
        shares["trained_share"] = policy.get("trained_tokens", 0.0) / sampled
    return {**figures, **group_figures(groups), **shares, **policy}


class _Recorded:
    """What user code recorded through the stats tracker, of which a run takes so many names and no more."""

    def __init__(self, names: set[str]) -> None:
        """`names` are those that the metrics of the run have already."""
        self._names = names
        self._has_dropped = False

    def means(self, groups: Sequence[GroupResult], own: Mapping[str, float]) -> dict[str, float]:
        """Under names that are not an evaluation's; if some were dropped here or in an episode, also how many."""
        self._names |= own.keys()
        values: dict[str, list[float]] = {}
        dropped = 0.0
        for episode in (episode for group in groups for episode in group.episodes):
            for name, value in episode.stats.items():
                if name == DROPPED:
                    dropped += value
                elif name in self._names or len(self._names) < MAX_FIGURES:
                    self._names.add(name)
                    values.setdefault(name, []).append(value)
                else:
                    dropped += 1
        with np.errstate(over="ignore", invalid="ignore"):  # users may record what they like
            means = {name: float(np.mean(each)) for name, each in values.items() if not name.startswith(EVALUATIONS)}
        if dropped:
            self._warn(dropped)
            means[DROPPED] = dropped
        return means

    def _warn(self, dropped: float) -> None:
        """Once: the figure tells of the rest."""
        if self._has_dropped:
            return
        self._has_dropped = True
        logger.warning(
            "statistics may have %d names in an episode and %d in a run, each of %d printable characters at most; "
            "%d values were dropped (figure %s): record under fewer names, without ids of tasks or words of the model",
            MAX_NAMES,
            MAX_FIGURES,
            MAX_NAME_CHARACTERS,
            dropped,
            DROPPED,
        )


def overlap(training: Sequence[tuple[float, float]], producing: Sequence[tuple[float, float]]) -> float:
    """Share of the training intervals in which the engine was producing tokens too."""
    total = sum(end - start for start, end in training)
    shared, first = 0.0, 0
    busy = sorted(producing)
    for start, end in sorted(training):
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        for b_start, b_end in busy[first:]:
            if b_start >= end:
                break
            shared += min(end, b_end) - max(start, b_start)
    return shared / total if total else 0.0


def pause_figures(seconds: Sequence[float]) -> dict[str, float]:
    """Median and maximum; empty if there was no pause."""
    return {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {}


class TokenRate:
    """Tokens per second over the last `RATE_STEPS` steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The first step is measured from now."""
        self._clock = clock
        self._marks = deque([(clock(), 0.0)], maxlen=RATE_STEPS + 1)
        """When each step ended, and the tokens of all steps up to it."""

    def step(self, tokens: float) -> float:
        """A step of `tokens` tokens ends now; returns the rate."""
        self._marks.append((self._clock(), self._marks[-1][1] + tokens))
        (began, before), (now, total) = self._marks[0], self._marks[-1]
        return (total - before) / max(now - began, 1e-9)
