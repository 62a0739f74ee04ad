"""`areal simulate --engines 64 --trainers 32 --latency trace.json`: what a run would do on machines you do not have."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from areal.api.errors import ConfigError
from areal.simulation.scenario import Prediction, Scenario, predict
from areal.simulation.trace import read_trace, record

COUNTS = ("engines", "trainers", "workers", "batch_size", "n_samples", "max_concurrent_rollouts", "steps")
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


def run(args: argparse.Namespace) -> int:
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if min(args.eta) < 0 or (args.cores is not None and args.cores <= 0):
        raise ConfigError(f"--eta must be >= 0 and --cores > 0, got {args.eta} and {args.cores}")
    for path in filter(None, (args.save, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(
                f"{path!r} cannot be written: there is no directory {str(Path(path).parent)!r}; create it"
            )
    trace = record(args.latency) if Path(args.latency).is_dir() else read_trace(args.latency)
    if args.save:
        trace.save(args.save)
    counts = {name: getattr(args, name) for name in COUNTS}
    predictions = {
        eta: predict(Scenario(trace, max_head_offpolicyness=eta, cores=args.cores, **counts)) for eta in args.eta
    }
    if args.json:
        print(json.dumps({f"eta_{eta}": dataclasses.asdict(each) for eta, each in predictions.items()}))
    else:
        Console(file=sys.stdout).print(_table(args, predictions))
    if args.plot:
        _plot(predictions, args.plot)
    return 0


def _table(args: argparse.Namespace, predictions: dict[int, Prediction]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{args.steps} steps of {args.batch_size} × {args.n_samples} episodes, "
        f"{args.max_concurrent_rollouts} at once,\n"
        f"engines: {args.engines}, trainers: {args.trainers}, workers: {args.workers}",
        caption="predicted: the real admission and staleness code on a virtual clock",
    )
    first = next(iter(predictions.values()))
    for name in HEADINGS:
        table.add_column(name, justify="right")
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
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (speed, idle) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    etas: list[Any] = [str(eta) for eta in predictions]
    every = list(predictions.values())
    speed.bar(etas, [each.episodes / each.seconds for each in every], color="tab:blue")
    speed.set(xlabel="η (versions a sample may be behind)", ylabel="episodes per second")
    idle.plot(etas, [each.trainer_idle for each in every], "o-", label="trainer")
    idle.plot(etas, [each.engine_idle for each in every], "s-", label="engine")
    idle.set(xlabel="η (versions a sample may be behind)", ylabel="share of the time idle", ylim=(0, 1))
    idle.legend(frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # a file name suffix that matplotlib does not know
        raise ConfigError(f"--plot {path}: {error}") from None
    pyplot.close(figure)
