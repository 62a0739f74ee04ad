"""What a run writes down and shows: metrics, conversations, the progress bar, the curve, the summary."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal.api.messages import GroupResult
from areal.trainer.curve import draw_reward_curve
from areal.trainer.evaluation import Evaluation, verdict
from areal.trainer.metrics import MetricsLog, read_metrics
from areal.trainer.progress import Progress
from areal.trainer.run_directory import RunDirectory
from areal.trainer.transcript import RolloutLog, render_episode


class Journal:
    def __init__(self, directory: RunDirectory, total_steps: int, first_step: int) -> None:
        """`first_step` steps are already in the logs; what lies beyond was never trained on and is dropped."""
        self._directory = directory
        self._total_steps = total_steps
        self._began = time.monotonic()
        self._calls = 0
        self._worst_difference = 0.0
        self._evaluations: dict[str, Evaluation] = {}
        self._stack = ExitStack()
        self.progress = self._stack.enter_context(Progress(total_steps, first_step))
        self._metrics = self._stack.enter_context(MetricsLog(directory.path, first_step + 1 if first_step else 0))
        self._rollouts = RolloutLog(directory.path, first_step + 1 if first_step else 0)
        self._stack.callback(self._rollouts.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start_clock(self) -> None:
        """Training begins now."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def step(self, step: int, groups: Sequence[GroupResult], figures: Mapping[str, float]) -> None:
        for group in groups:
            for episode in group.episodes:
                self._rollouts.append(step, group.task_id, episode)
        self._calls += int(figures["calls"])
        self._worst_difference = max(self._worst_difference, figures.get("max_logprob_difference", 0.0))
        self._write(step, figures)
        if step in (1, self._total_steps // 2, self._total_steps):
            self._show_some(step, groups)

    def evaluation(self, step: int, when: str, results: Sequence[GroupResult], *, greedy: bool) -> None:
        evaluation = Evaluation.of(results)
        self._calls += sum(episode.calls for result in results for episode in result.episodes)
        self._evaluations[f"{when}_greedy" if greedy else when] = evaluation
        self._write(step, {"eval_greedy_reward" if greedy else "eval_reward": evaluation.reward})

    def summary(self) -> dict[str, Any]:
        """Everything this journal knows at the end."""
        seconds = self.seconds
        known = {
            "seconds": seconds,
            "calls": self._calls,
            "calls_per_second": self._calls / seconds,
            "max_logprob_difference": self._worst_difference,
            "held_out": {when: asdict(evaluation) for when, evaluation in self._evaluations.items()},
        }
        if {"before", "after"} <= self._evaluations.keys():
            known["verdict"] = verdict(self._evaluations["before"], self._evaluations["after"], seconds)
        return known

    def draw(self) -> Path:
        draw_reward_curve(read_metrics(self._directory.path), self._directory.curve)
        return self._directory.curve

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        row = {"time_seconds": self.seconds, **figures}
        self._metrics.write(step, row)
        self.progress.update(step, row)

    def _show_some(self, step: int, groups: Sequence[GroupResult]) -> None:
        """The best and the worst conversation of the batch."""
        episodes = sorted((episode for group in groups for episode in group.episodes), key=lambda each: each.reward)
        for episode in {id(each): each for each in (episodes[0], episodes[-1])}.values():
            self.progress.say(render_episode(episode, title=f"step {step}"))
