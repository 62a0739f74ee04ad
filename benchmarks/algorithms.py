"""How well does each algorithm learn? Every preset on the built-in task at η = 0 and 2, with the same budget.

A run is 150 steps of `RLVRWorkflow` on sort-digits with the settings of the example, and ends with held-out success on
2,000 tasks; a preset has the mean over its seeds with a 95 % interval. Finished runs are kept in a file (`--results`)
and not repeated, so a run that `--minutes` or Ctrl-C has ended goes on where it was. `--compare` asks one question with
five seeds: does η = 2 learn as much per step as η = 0?
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.config.presets import PRESETS
from benchmarks.peers import cache_directory
from benchmarks.report import Aim, main

EXAMPLE = Path(__file__).parent.parent / "examples" / "agent_workflow" / "config.yaml"
ETAS = (0, 2)
SEEDS, COMPARED_SEEDS = 3, 5
STEPS = 150
PROBLEMS = 2000
COMPARED = ("default", "decoupled", "dapo", "cispo")
"""Presets that `--compare` takes, unless others are named: those that a run without a name has, and, chosen after a run
of all presets, the one that learnt most at η = 2 and the one that lost least there."""
SETTINGS = {
    "reward_fn": "areal.reward.exact_match_reward",
    "rollout.num_workers": "1",
    "scheduler.threads": "1",
    "evaluator.freq_steps": "null",
    "evaluator.greedy": "false",
    "saver.freq_steps": "null",
    "actor.eps_clip_higher": "preset",  # the example sets one
}
OWN = {"ppo": {"critic.path": "builtin:tiny-math", "critic.optimizer.lr": "1.0e-3"}}
"""What a preset cannot do without."""
LEARNED = 0.2
"""Held-out success that every preset gains at least: ten times its standard deviation."""
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""By the number of values: how many standard errors a 95 % interval has on each side."""


@dataclass(frozen=True)
class Result:
    preset: str
    eta: int
    seed: int
    steps: int
    problems: int
    before: float
    after: float
    seconds: float

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        return self.preset, self.eta, self.seed, self.steps, self.problems


@dataclass(frozen=True)
class Mean:
    """Held-out success of a preset over its seeds."""

    success: float
    low: float
    high: float
    seeds: int


def train(preset: str, eta: int, seed: int, steps: int, problems: int) -> Result:
    from areal import PPOTrainer

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as output_dir:
        settings = {
            **SETTINGS,
            **OWN.get(preset.split("+")[0], {}),
            "output_dir": output_dir,
            "seed": str(seed),
            "total_train_steps": str(steps),
            "valid_dataset.size": str(problems),
            "rollout.max_head_offpolicyness": str(eta),
            "actor.algorithm": preset,
        }
        words = [f"--config={EXAMPLE}", *(f"{name}={value}" for name, value in settings.items())]
        config, _ = load_expr_config(words, GRPOConfig)
        with PPOTrainer(config) as trainer:
            held_out = trainer.train(workflow="areal.workflow.RLVRWorkflow").summary["held_out"]
    before, after = held_out["before"]["reward"], held_out["after"]["reward"]
    return Result(preset, eta, seed, steps, problems, before, after, time.monotonic() - began)


def collect(
    presets: Sequence[str], etas: Sequence[int], seeds: int, steps: int, problems: int, results: Path, minutes: float
) -> list[Result]:
    """The runs that are in the file, then as many of the others as there is time for; seed by seed, so that an early
    end leaves every preset with about as many."""
    known = {each.key: each for each in _read(results)}
    wanted = [(preset, eta, seed) for seed in range(1, seeds + 1) for eta in etas for preset in presets]
    until, found = time.monotonic() + 60 * minutes, []
    for number, (preset, eta, seed) in enumerate(wanted, 1):
        result = known.get((preset, eta, seed, steps, problems))
        if result is None and time.monotonic() < until:
            result = train(preset, eta, seed, steps, problems)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        if result is not None:
            found.append(result)
            line = f"{preset} η={eta} seed {seed}: {result.before:.3f} → {result.after:.3f} in {result.seconds:.0f} s"
            print(f"{number}/{len(wanted)}  {line}", file=sys.stderr)
    return found


def _read(results: Path) -> Iterator[Result]:
    if results.exists():
        for line in results.read_text(encoding="utf-8").splitlines():
            yield Result(**json.loads(line))


def mean_of(results: Sequence[Result]) -> Mean:
    """With the spread over seeds; of a single run that of its tasks."""
    values = [each.after for each in results]
    middle = fmean(values)
    if len(values) > 1:
        half = STUDENT.get(len(values), 1.96) * stdev(values) / math.sqrt(len(values))
    else:
        half = 1.96 * math.sqrt(middle * (1 - middle) / results[0].problems)
    return Mean(middle, middle - half, middle + half, len(values))


def table(results: Sequence[Result]) -> dict[str, dict[int, Mean]]:
    by_place: dict[tuple[str, int], list[Result]] = {}
    for each in results:
        by_place.setdefault((each.preset, each.eta), []).append(each)
    found: dict[str, dict[int, Mean]] = {}
    for (preset, eta), members in by_place.items():
        found.setdefault(preset, {})[eta] = mean_of(members)
    return found


def staleness_aim(means: dict[str, dict[int, Mean]]) -> list[Aim]:
    """The best preset at η = 2 against the interval of the default at η = 0, or of itself where that was not run."""
    stale = {preset: each[2] for preset, each in means.items() if 2 in each}
    if not stale:
        return []
    best = max(stale, key=lambda preset: stale[preset].success)
    fresh = means.get("default", {}).get(0) or means[best].get(0)
    if fresh is None:
        return []
    name = f"held-out success of the best preset at η = 2 ({best}), against the low end of the interval at η = 0"
    return [Aim.at_least(name, stale[best].success, fresh.low)]


def draw(means: dict[str, dict[int, Mean]], path: Path) -> None:
    """Held-out success of each preset with its intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(means)
    for eta, shift, colour in ((0, -0.12, "#1f6fb4"), (2, 0.12, "#d1602a")):
        places = [(place + shift, means[name][eta]) for place, name in enumerate(names) if eta in means[name]]
        axes.errorbar(
            [place for place, _ in places],
            [each.success for _, each in places],
            [[each.success - each.low for _, each in places], [each.high - each.success for _, each in places]],
            fmt="o",
            capsize=3,
            color=colour,
            label=f"η = {eta}",
        )
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("held-out success")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Aim]]:
    presets = arguments.presets.split(",") if arguments.presets else list(COMPARED if arguments.compare else PRESETS)
    etas = [int(each) for each in arguments.etas.split(",")]
    seeds = arguments.seeds or (COMPARED_SEEDS if arguments.compare else SEEDS)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    results = collect(presets, etas, seeds, arguments.steps, arguments.problems, arguments.results, arguments.minutes)
    means = table(results)
    if arguments.picture:
        draw(means, arguments.picture)
    aims = staleness_aim(means)
    if results:
        least = min(each.after - each.before for each in results)
        aims.insert(0, Aim.at_least("the least held-out success that a run has gained", least, LEARNED))
    figures = {
        "presets": {preset: {eta: asdict(mean) for eta, mean in each.items()} for preset, each in means.items()},
        "runs": [asdict(each) for each in results],
        "complete": len(results) == len(presets) * len(etas) * seeds,
    }
    return figures, aims


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("--presets", help="names with commas between them (default: all)")
    made.add_argument("--etas", default=",".join(map(str, ETAS)), help="values of max_head_offpolicyness")
    made.add_argument("--seeds", type=int, help=f"runs of each (default: {SEEDS}, with --compare {COMPARED_SEEDS})")
    made.add_argument("--steps", type=int, default=STEPS)
    made.add_argument("--problems", type=int, default=PROBLEMS, help="held-out tasks")
    made.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after so many")
    made.add_argument("--compare", action="store_true", help="η = 2 against η = 0, five seeds of fewer presets")
    made.add_argument("--results", type=Path, default=cache_directory() / "algorithms.jsonl", help="finished runs")
    made.add_argument("--picture", type=Path, help="where to draw the table")
    return made


if __name__ == "__main__":
    options = parser()
    asked = options.parse_known_args()[0]
    main(__doc__ or "", lambda: run(asked), options)
