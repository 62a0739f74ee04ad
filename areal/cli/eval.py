"""`areal eval --model DIR --workflow my_module.MyAgent --data test.jsonl`: how good models are on tasks, and how sure.

Success has a 95 % interval, with several episodes per task also pass@k; further models are compared with the first,
task by task. A rejected episode is a failure.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from areal.api.errors import ConfigError
from areal.config.errors import require
from areal.config.experiment import DatasetConfig, GRPOConfig
from areal.config.loader import load_expr_config
from areal.dataset import get_custom_dataset
from areal.engine.model_path import check_model_path
from areal.rollout.loading import WorkflowSpec, check
from areal.trainer.display import waiting
from areal.utils.shorten import plural

if TYPE_CHECKING:  # they load torch or rich
    from rich.progress import TaskID
    from rich.table import Table

    from areal.trainer.comparison import Contest, Measured


def run(args: argparse.Namespace) -> int:
    words = ["--config", args.config] if args.config else []
    config, _ = load_expr_config(words + args.overrides, GRPOConfig)
    spec = WorkflowSpec(_workflow(args, config))
    check(spec, config.reward_fn)
    samples = _samples(args, config)
    dataset = _dataset(args, config)
    tasks = get_custom_dataset("test", dataset)
    models = args.model or [config.actor.path]
    for model in models:
        check_model_path(model)
    with waiting(f"{plural(len(tasks), 'task')} of {dataset.path}; loading torch"):
        from areal.trainer.comparison import Contest, measure

    contest = Contest(config, spec, tasks, samples, args.greedy)
    with _Bar(contest) as bar:
        measured = measure(contest, models, bar.begin, bar.advance)
    if args.json:
        about = {"data": dataset.path, "tasks": len(tasks), "n_samples": samples, "greedy": args.greedy}
        print(json.dumps({**about, "models": [each.as_json() for each in measured]}), file=args.stdout)
    else:
        _show(contest, dataset.path, measured)
    return 0


def _workflow(args: argparse.Namespace, config: GRPOConfig) -> str:
    name: str = args.workflow or config.workflow
    require(name != "", "--workflow must name what plays the tasks; add --workflow my_module.MyAgent, or --config FILE")
    return name


def _samples(args: argparse.Namespace, config: GRPOConfig) -> int:
    samples: int = 1 if args.greedy else config.evaluator.n_samples if args.n_samples is None else args.n_samples
    require(samples >= 1, f"--n-samples must be >= 1, got {samples}")
    return samples


def _dataset(args: argparse.Namespace, config: GRPOConfig) -> DatasetConfig:
    given = DatasetConfig(path=args.data) if args.data else config.valid_dataset
    require(given.path != "", "--data must name the tasks; add --data test.jsonl or --data builtin:sort-digits")
    try:
        return replace(given, split=args.split or given.split, size=given.size if args.size is None else args.size)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None


class _Bar:
    """Episodes done, on stderr: a bar for each model in a terminal, elsewhere a line when one begins."""

    def __init__(self, contest: "Contest") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._episodes = contest.episodes
        self._in_terminal = Console(stderr=True).is_terminal
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._current: TaskID | None = None

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._in_terminal:  # elsewhere it would print an empty line
            self._bars.stop()

    def begin(self, model: str) -> None:
        if self._in_terminal:
            self._bars.start()
        else:
            print(f"{model}: {plural(self._episodes, 'episode')}", file=sys.stderr, flush=True)
        self._current = self._bars.add_task(model, total=self._episodes)

    def advance(self) -> None:
        assert self._current is not None, "a model begins before its episodes end"
        self._bars.advance(self._current)


def _show(contest: "Contest", data: str, measured: "list[Measured]") -> None:
    from rich.console import Console

    each = "once each" if contest.samples == 1 else f"{contest.samples} times each"
    how = "greedily" if contest.greedy else f"sampled {each}"
    console = Console(highlight=False)
    console.print(f"{plural(len(contest.tasks), 'task')} of {data}, {how}", markup=False)
    for number, model in enumerate(measured, 1):
        console.print(f"{number}  {model.model}{_rejected(model)}", markup=False, soft_wrap=True)
    console.print(_table(measured))


def _rejected(measured: "Measured") -> str:
    found = measured.evaluation
    if not found.rejected:
        return ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in measured.rejections.items())
    counted = "counted as failures" if found.is_success else "left out"
    return f": {found.rejected} of {found.episodes} episodes rejected ({reasons}), {counted}"


def _table(measured: "list[Measured]") -> "Table":
    """A row for each, by number: names of models are long."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    samples = min(len(each.evaluation.pass_at_k) for each in measured)
    shown = [k for k in range(2, samples + 1) if k == samples or k & (k - 1) == 0]
    what = "success" if all(each.evaluation.is_success for each in measured) else "reward"
    for heading in ("", what, "95 %", *(f"pass@{k}" for k in shown)):
        table.add_column(heading)
    if len(measured) > 1:
        table.add_column("to the first (95 %)")
    for number, each in enumerate(measured, 1):
        found, change = each.evaluation, each.difference
        interval = f"{found.interval[0]:.3f}–{found.interval[1]:.3f}" if found.interval else ""
        difference = f"{change.mean:+.3f} ({change.low:+.3f} to {change.high:+.3f})" if change else ""
        passes = [f"{found.pass_at_k[k - 1]:.3f}" for k in shown]
        table.add_row(
            str(number), f"{found.reward:.3f}", interval, *passes, *([difference] if len(measured) > 1 else [])
        )
    return table
