"""What a run writes down and shows: metrics, conversations, the progress bar, the curve, the summary.

A resumed run continues its journal: counts and seconds go on from the checkpoint, and what was measured before the
first step is remembered, not measured again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal.api.messages import GroupResult
from areal.trainer.curve import draw_reward_curve
from areal.trainer.evaluation import Evaluation, verdict
from areal.trainer.metrics import MetricsLog, read_metrics
from areal.trainer.pace import Pace
from areal.trainer.progress import Progress
from areal.trainer.run_directory import RunDirectory, write_atomically
from areal.trainer.transcript import RolloutLog, render_episode

BEFORE, DURING, AFTER = "before", "during", "after"
"""When an evaluation is made: before the first step, between two, after the last."""


@dataclass
class Account:
    """Running totals of a run, over all its sessions."""

    seconds: float = 0.0
    """From the first evaluation on."""
    calls: int = 0
    max_logprob_difference: float = 0.0


class Journal:
    def __init__(self, directory: RunDirectory, total_steps: int, first_step: int, account: Account) -> None:
        """`first_step` steps are already in the logs; what lies beyond was never trained on and is dropped."""
        self._directory = directory
        self._total_steps = total_steps
        self._account = account
        self._began = time.monotonic() - account.seconds
        self._pace = Pace()
        self._evaluations = _remembered(directory.held_out)
        self._stack = ExitStack()
        self.progress = self._stack.enter_context(Progress(total_steps, first_step))
        self._metrics = self._stack.enter_context(MetricsLog(directory.path, first_step + 1))
        self._rollouts = self._stack.enter_context(RolloutLog(directory.path, first_step + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start_clock(self) -> None:
        """Training begins now."""
        self._began = time.monotonic() - self._account.seconds
        self._pace = Pace()

    @property
    def account(self) -> Account:
        """What a checkpoint keeps of this journal."""
        return replace(self._account, seconds=self._seconds)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def step(self, step: int, groups: Sequence[GroupResult], figures: Mapping[str, float]) -> None:
        for group in groups:
            for episode in group.episodes:
                self._rollouts.append(step, group.task_id, episode)
        account = self._account
        account.calls += int(figures["calls"])
        account.max_logprob_difference = max(account.max_logprob_difference, figures.get("max_logprob_difference", 0.0))
        self._write(step, {"tokens_per_second": self._pace.step(figures["tokens"]), **figures})
        if step in (1, self._total_steps // 2, self._total_steps):
            self._show_some(step, groups)

    def evaluation(self, step: int, when: str, results: Sequence[GroupResult], *, greedy: bool) -> None:
        evaluation = Evaluation.of(results)
        self._account.calls += sum(episode.calls for result in results for episode in result.episodes)
        self._evaluations[_name(when, greedy)] = evaluation
        self._write(step, {"eval_greedy_reward" if greedy else "eval_reward": evaluation.reward})
        if when == BEFORE:
            known = {name: asdict(each) for name, each in self._evaluations.items()}
            write_atomically(self._directory.held_out, json.dumps(known, indent=2) + "\n")

    def remembers(self, when: str, *, greedy: bool) -> bool:
        return _name(when, greedy) in self._evaluations

    def summary(self) -> dict[str, Any]:
        """Everything this journal knows at the end."""
        account = self.account
        known = {
            **asdict(account),
            "calls_per_second": account.calls / account.seconds,
            "held_out": {when: asdict(evaluation) for when, evaluation in self._evaluations.items()},
        }
        if {BEFORE, AFTER} <= self._evaluations.keys():
            known["verdict"] = verdict(self._evaluations[BEFORE], self._evaluations[AFTER], account.seconds)
        return known

    def draw(self) -> Path:
        draw_reward_curve(read_metrics(self._directory.path), self._directory.curve)
        return self._directory.curve

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        row = {"time_seconds": self._seconds, **figures}
        self._metrics.write(step, row)
        self.progress.update(step, row)

    def _show_some(self, step: int, groups: Sequence[GroupResult]) -> None:
        """The best and the worst conversation of the batch."""
        episodes = sorted((episode for group in groups for episode in group.episodes), key=lambda each: each.reward)
        for episode in {id(each): each for each in (episodes[0], episodes[-1])}.values():
            self.progress.say(render_episode(episode, title=f"step {step}"))


def _name(when: str, greedy: bool) -> str:
    return f"{when}_greedy" if greedy else when


def _remembered(path: Path) -> dict[str, Evaluation]:
    if not path.exists():
        return {}
    return {name: Evaluation(**each) for name, each in json.loads(path.read_text(encoding="utf-8")).items()}
