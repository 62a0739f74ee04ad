"""`areal simulate --machines FILE --gpus 64 --latency trace.json`: what a run would do on machines you do not have."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from areal.api.errors import ConfigError
from areal.config.parallel import Ranks
from areal.simulation.bottleneck import Bottleneck, find_bottleneck
from areal.simulation.failure_costs import FailureCost, SavingAdvice, failure_costs, saving_advice
from areal.simulation.machines import Machines
from areal.simulation.scenario import Prediction, Scenario, predict
from areal.simulation.trace import Trace, read_trace, record
from areal.utils.installing import missing

COUNTS = ("engines", "trainers", "workers", "batch_size", "n_samples", "max_concurrent_rollouts", "steps")
DEFAULT_ETAS, DEFAULT_ETA = [0, 1, 2, 4], [4]
HEADINGS = (
    "η",
    "\nseconds",
    "\nfaster",
    "episodes\n/ s",
    "tokens\n/ s",
    "trainer\nidle",
    "engine\nidle",
    "requests\n/ eng.",
    "mean\nlag",
    "\nexpired",
)
AS_GIVEN = "as the file says"
LINKS = (
    "waiting for episodes",
    "waiting for the oldest",
    "dealing",
    "computing",
    "communicating",
    "publishing",
    "saving",
    "restarting",
)
"""Of the training loop, in the order in which they are drawn."""
COLOURS = ("#c7c7c7", "#7f7f7f", "#9467bd", "#1f77b4", "#17becf", "#ff7f0e", "#8c564b", "#d62728")


def run(args: argparse.Namespace) -> int:
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    args.eta = args.eta or (DEFAULT_ETA if args.gpus else DEFAULT_ETAS)
    if min(args.eta) < 0 or (args.cores is not None and args.cores <= 0):
        raise ConfigError(f"--eta must be >= 0 and --cores > 0, got {args.eta} and {args.cores}")
    if args.machines is None and (args.ranks or args.gpus or args.set or args.compare):
        raise ConfigError("--ranks, --gpus, --set and --compare are about --machines FILE; give that too")
    if args.machines is not None and not (args.ranks or args.gpus):
        raise ConfigError("--machines needs --ranks fsdp:dN, or --gpus N to have them divided")
    for path in filter(None, (args.save, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(
                f"{path!r} cannot be written: there is no directory {str(Path(path).parent)!r}; create it"
            )
    trace = record(args.latency) if Path(args.latency).is_dir() else read_trace(args.latency)
    if args.save:
        trace.save(args.save)
    return _on_machines(args, trace) if args.machines else _by_eta(args, trace)


def _by_eta(args: argparse.Namespace, trace: Trace) -> int:
    counts = {name: getattr(args, name) for name in COUNTS}
    predictions = {
        eta: predict(
            Scenario(trace, max_head_offpolicyness=eta, when_stale=args.when_stale, cores=args.cores, **counts)
        )
        for eta in args.eta
    }
    if args.json:
        print(
            json.dumps({f"eta_{eta}": dataclasses.asdict(each) for eta, each in predictions.items()}), file=args.stdout
        )
    else:
        Console(file=sys.stdout).print(_table(args, predictions))
    if args.plot:
        _plot(predictions, args.plot)
    return 0


@dataclasses.dataclass(frozen=True)
class _SizedRun:
    """A run on machines, and what is to be said of it."""

    variant: str
    scenario: Scenario
    prediction: Prediction
    bottleneck: Bottleneck
    failures: list[FailureCost]
    saving: SavingAdvice | None

    def as_json(self) -> dict[str, Any]:
        s = self.scenario
        assert s.ranks is not None
        settings = {
            "gpus": s.gpus,
            "engines": s.engines,
            "ranks": f"fsdp:d{s.ranks.ranks.data}t{s.ranks.ranks.tensor}",
            **{name: getattr(s, name) for name in COUNTS if name not in ("engines", "trainers")},
            "max_head_offpolicyness": s.max_head_offpolicyness,
            "when_stale": s.when_stale,
        }
        fan_out = {**s.fan_out.limits(), "stage": s.fan_out.stage_seconds(), "write": s.fan_out.write_seconds}
        return {
            "variant": self.variant,
            "settings": settings,
            **dataclasses.asdict(self.prediction),
            "fan_out_seconds": fan_out,
            "bottleneck": dataclasses.asdict(self.bottleneck),
            "failure_costs": [dataclasses.asdict(each) for each in self.failures],
            "checkpoints": None if self.saving is None else dataclasses.asdict(self.saving),
        }


def _on_machines(args: argparse.Namespace, trace: Trace) -> int:
    variants = {AS_GIVEN: args.set}
    if args.compare:
        variants[f"with {', '.join(args.compare)}"] = [*args.set, *args.compare]
    runs = []
    for variant, changes in variants.items():
        machines = Machines.read(args.machines, changes)
        for scenario in _scenarios(args, machines, trace):
            prediction = predict(scenario)
            runs.append(
                _SizedRun(
                    variant,
                    scenario,
                    prediction,
                    find_bottleneck(scenario, prediction, machines.engine_room),
                    failure_costs(scenario, prediction),
                    saving_advice(scenario, prediction.step_seconds),
                )
            )
    if args.json:
        print(json.dumps({"runs": [each.as_json() for each in runs]}), file=args.stdout)
    else:
        _print_runs(args, runs)
    if args.plot:
        _plot_runs(runs, args.plot)
    return 0


def _scenarios(args: argparse.Namespace, machines: Machines, trace: Trace) -> list[Scenario]:
    if args.ranks:
        ranks, counts = Ranks.parse(args.ranks), {name: getattr(args, name) for name in COUNTS}
        engines, _ = counts.pop("engines"), counts.pop("trainers")
        planned = [machines.scenario(trace, engines, ranks, max_head_offpolicyness=eta, **counts) for eta in args.eta]
    else:
        counts = {name: getattr(args, name) for name in ("batch_size", "n_samples", "steps")}
        planned = [machines.plan(trace, gpus, eta=eta, **counts) for gpus in args.gpus for eta in args.eta]
    return [dataclasses.replace(scenario, when_stale=args.when_stale) for scenario in planned]


def _print_runs(args: argparse.Namespace, runs: list[_SizedRun]) -> None:
    console = Console(file=sys.stdout)
    for variant in dict.fromkeys(each.variant for each in runs):
        of_variant = [each for each in runs if each.variant == variant]
        console.print(_speed_table(args, variant, of_variant))
        console.print(_use_table(of_variant))
        for each in of_variant:
            s, found = each.scenario, each.bottleneck
            console.print(
                f"{s.gpus} GPUs, η = {s.max_head_offpolicyness}: [bold]{found.part}[/bold] first: {found.remedy}",
                soft_wrap=True,
            )
        if any(each.failures for each in of_variant):
            console.print(_failure_table(of_variant))


def _speed_table(args: argparse.Namespace, variant: str, runs: list[_SizedRun]) -> Table:
    table = _empty_table(
        f"{Path(args.machines).name}, {variant}:\n{args.steps} steps of {args.batch_size} × {args.n_samples} episodes",
        "speeds of GPUs are computed from the file, not measured",
        ("GPUs", "engines", "ranks", "workers", "at once", "η", "s/step", "tokens/s", "lag", "saturated"),
    )
    for each in runs:
        s = each.scenario
        table.add_row(
            str(s.gpus),
            str(s.engines),
            str(s.trainer_gpus),
            str(s.workers),
            f"{s.max_concurrent_rollouts:,}",
            str(s.max_head_offpolicyness),
            f"{each.prediction.step_seconds:,.1f}",
            f"{rate:,.0f}" if (rate := _tokens_per_second(each)) >= 100 else f"{rate:.2g}",
            f"{each.prediction.mean_staleness:.1f}",
            each.bottleneck.part,
        )
    return table


def _use_table(runs: list[_SizedRun]) -> Table:
    columns = [f"{each.scenario.gpus} GPUs\nη = {each.scenario.max_head_offpolicyness}" for each in runs]
    table = _empty_table("how much of each part is used, and of the training loop's time, in %", "", ("", *columns))
    used = {name: None for each in runs for name in each.prediction.utilisation}
    for name in used:
        table.add_row(name, *(f"{100 * each.prediction.utilisation.get(name, 0.0):.0f}" for each in runs))
    table.add_section()
    for link in LINKS:
        shares = [each.prediction.loop.get(link, 0.0) for each in runs]
        if any(shares):
            table.add_row(link, *(f"{100 * share:.0f}" for share in shares))
    return table


def _tokens_per_second(run: _SizedRun) -> float:
    """After the pipeline has filled."""
    return run.prediction.tokens / run.scenario.steps / run.prediction.step_seconds


def _failure_table(runs: list[_SizedRun]) -> Table:
    names = ("a day", "GPU-hours\neach", "% of all\nGPU-hours", "save every\nsteps (best)", "√(2δM)\nseconds")
    table = _empty_table(
        "what failures cost, expected",
        "best: with the least expected loss, and no more often than a checkpoint can be written",
        ("GPUs", "what ends", *names),
    )
    for each in runs:
        for number, cost in enumerate(each.failures):
            saves = each.saving if cost.kind == "rank or driver" else None
            table.add_row(
                "" if number else str(each.scenario.gpus),
                cost.kind,
                f"{cost.per_day:.2g}",
                f"{cost.gpu_hours:.2g}",
                f"{100 * cost.share:.2g}",
                f"{each.scenario.checkpoints.steps or '–'} ({saves.best.steps})" if saves else "",
                f"{saves.young_daly_seconds:.0f}" if saves else "",
            )
    return table


def _empty_table(title: str, caption: str, headings: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title=title, caption=caption)
    for name in headings:
        table.add_column(name, justify="right")
    return table


def _table(args: argparse.Namespace, predictions: dict[int, Prediction]) -> Table:
    table = _empty_table(
        f"{args.steps} steps of {args.batch_size} × {args.n_samples} episodes, "
        f"{args.max_concurrent_rollouts} at once,\n"
        f"engines: {args.engines}, trainers: {args.trainers}, workers: {args.workers}",
        "predicted: the real admission and staleness code on a virtual clock",
        HEADINGS,
    )
    first = next(iter(predictions.values()))
    for eta, each in predictions.items():
        table.add_row(
            str(eta),
            f"{each.seconds:,.1f}",
            f"{first.seconds / each.seconds:.2f}×",
            f"{each.episodes / each.seconds:,.1f}",
            f"{each.tokens / each.seconds:,.0f}",
            f"{each.trainer_idle:.0%}",
            f"{each.engine_idle:.0%}",
            f"{each.engine_requests:.1f}",
            f"{each.mean_staleness:.2f}",
            str(each.expired),
        )
    return table


def _plot(predictions: dict[int, Prediction], path: str) -> None:
    pyplot = _pyplot()
    figure, (speed, idle) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    etas: list[Any] = [str(eta) for eta in predictions]
    every = list(predictions.values())
    speed.bar(etas, [each.episodes / each.seconds for each in every], color="tab:blue")
    speed.set(xlabel="η (versions a sample may be behind)", ylabel="episodes per second")
    idle.plot(etas, [each.trainer_idle for each in every], "o-", label="trainer")
    idle.plot(etas, [each.engine_idle for each in every], "s-", label="engine")
    idle.set(xlabel="η (versions a sample may be behind)", ylabel="share of the time idle", ylim=(0, 1))
    idle.legend(frameon=False)
    _save_figure(pyplot, figure, path)


def _plot_runs(runs: list[_SizedRun], path: str) -> None:
    """Speed over size, and beside it where the training loop's time goes, for each variant."""
    pyplot = _pyplot()
    variants = list(dict.fromkeys(each.variant for each in runs))
    figure, axes = pyplot.subplots(
        1, 1 + len(variants), figsize=(5 + 3.6 * len(variants), 4.2), layout="constrained", squeeze=False
    )
    speed, *loops = axes[0]
    for variant, marker in zip(variants, "os", strict=False):
        of_variant = [each for each in runs if each.variant == variant]
        sizes, rates = [each.scenario.gpus for each in of_variant], [_tokens_per_second(each) for each in of_variant]
        speed.plot(sizes, rates, f"{marker}-", label=variant if len(variant) < 40 else _in_lines(variant))
    first = runs[0]
    sizes = sorted({each.scenario.gpus for each in runs})
    per_gpu = _tokens_per_second(first) / first.scenario.gpus
    speed.plot(sizes, [per_gpu * size for size in sizes], ":", color="grey", label="in proportion")
    speed.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="trained tokens per second")
    speed.set_xticks(sizes, [str(size) for size in sizes])
    speed.minorticks_off()
    speed.legend(frameon=False, fontsize=8)
    for axis, variant in zip(loops, variants, strict=True):
        _stack_loop(axis, [each for each in runs if each.variant == variant])
        axis.set_title(_in_lines(variant), fontsize=9)
    loops[0].set_ylabel("share of the training loop's time")
    loops[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    _save_figure(pyplot, figure, path)


def _stack_loop(axis: Any, runs: list[_SizedRun]) -> None:
    names = [f"{each.scenario.gpus}\n{each.bottleneck.part}".replace(" ", "\n") for each in runs]
    bottoms = [0.0] * len(runs)
    for link, colour in zip(LINKS, COLOURS, strict=True):
        shares = [each.prediction.loop.get(link, 0.0) for each in runs]
        if any(shares) or link != "restarting":
            axis.bar(names, shares, bottom=bottoms, label=link, color=colour)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axis.set(ylim=(0, 1))
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _in_lines(text: str) -> str:
    return text.replace(", ", ",\n")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(missing("--plot needs matplotlib", error, "plot")) from error

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _save_figure(pyplot: Any, figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # a file name suffix that matplotlib does not know
        raise ConfigError(f"--plot {path}: {error}") from None
    pyplot.close(figure)
