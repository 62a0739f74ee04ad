"""`areal doctor`: is this machine ready, and will the run of a config fit?

Every check is a line: what was found, and a remedy where something is missing. Ends with 0 if nothing is missing.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal.api.errors import ConfigError
from areal.cli.doctor.checks import MARKS, MODEL, Check, all_checks, check_model
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config
from areal.engine.host_memory import model_shapes, this_machine
from areal.engine.model.shape import ModelShape
from areal.engine.sizing import GIB, Demand, HostMemory, Plan, Remedy, gpu_verdict, plan, remedies, verdict

MISSING = 1
SMALL_SHARE = 0.002
"""Smaller terms of a place are shown together."""


def run(args: argparse.Namespace) -> int:
    words = (["--config", args.config] if args.config else []) + args.overrides
    config, _ = load_expr_config(words, GRPOConfig)
    _check_arguments(args)
    console = Console(highlight=False, file=sys.stderr if args.json else sys.stdout)
    checks = []
    for check in _checks(args, config, chosen=bool(words)):
        checks.append(check)
        if not args.json:
            console.print(_line(check))
    failed = [check.name for check in checks if check.state == "missing"]
    sized = _size(args, config) if words and MODEL not in failed else None
    if sized is not None and not args.json:
        _show_plan(console, *sized)
    fits = sized is None or sized[2].fits
    if args.json:
        print(json.dumps(_as_json(checks, sized)), file=args.stdout)
    if failed and not args.json:
        console.print(Text(f"missing: {', '.join(failed)}", style="bold red"))
    return 0 if fits and not failed else MISSING


def _checks(args: argparse.Namespace, config: GRPOConfig, *, chosen: bool) -> Iterator[Check]:
    """Of the machine, and of the model where one is named."""
    yield from all_checks(config, chosen=chosen)
    if args.model or chosen:
        yield from check_model(args.model or config.actor.path, config.actor.backend if chosen else "")


_DEFAULTS = {
    "gpu_memory_gb": "this machine's",
    "gpus_per_node": "this machine's",
    "host_memory_gb": "this machine's",
    "prompt_tokens": "1024",
}


def _check_arguments(args: argparse.Namespace) -> None:
    for name in _DEFAULTS:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be > 0, got {value:g}; leave it out to take {_DEFAULTS[name]}"
            )


Sized = tuple[dict[str, ModelShape], HostMemory, Plan, dict[str, list[Remedy]]]


def _size(args: argparse.Namespace, config: GRPOConfig) -> Sized:
    """The models, the machine, the plan, and remedies for each place that is too small."""
    machine = this_machine(args.gpu_memory_gb, args.gpus_per_node, args.host_memory_gb)
    chosen = replace(config, actor=replace(config.actor, path=args.model)) if args.model else config
    models = model_shapes(chosen)
    planned = plan(config, models, machine, prompt_tokens=args.prompt_tokens)
    found = {
        demand.place: remedies(config, models, machine, demand.place, prompt_tokens=args.prompt_tokens)
        for demand in planned.demands
        if not demand.fits
    }
    return models, machine, planned, found


def _line(check: Check) -> Table:
    """A mark, the name, and what was found with a hanging indent."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, width=16)
    grid.add_column(overflow="fold")
    mark, style = MARKS[check.state]
    grid.add_row(Text(mark, style=style), check.name, check.found)
    if check.remedy:
        grid.add_row("", "", Text.assemble(("→ ", style), check.remedy))
    return grid


def _show_plan(
    console: Console,
    models: dict[str, ModelShape],
    machine: HostMemory,
    planned: Plan,
    found: dict[str, list[Remedy]],
) -> None:
    console.print()
    actor = models["actor"]
    gpus = f", GPUs of {machine.gpu_bytes / GIB:,.0f} GiB" if machine.gpu_bytes else ""
    console.print(
        f"memory, {actor.family or 'model'} of {_millions(actor.parameters)} parameters on hosts with "
        f"{machine.host_bytes / GIB:,.0f} GiB{gpus}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=True, header_style="dim")
    table.add_column("place")
    table.add_column("what for")
    table.add_column("GiB", justify="right")
    for demand in planned.demands:
        for name, what, size in _rows(demand):
            table.add_row(name, what, size)
    console.print(table)
    for demand in planned.demands:
        if demand.note:
            console.print(Text(f"{demand.place}: {demand.note}", style="dim"))
    for demand in planned.demands:
        if not demand.fits:
            console.print(Text(verdict(demand, found[demand.place]), style="bold red"))
    if not planned.enough_gpus:
        console.print(Text(gpu_verdict(planned), style="bold red"))
    if planned.fits:
        console.print(Text("fits", style="green"))


def _rows(demand: Demand) -> list[tuple[Text, Text, str]]:
    name = Text(f"{demand.place} × {demand.count}" if demand.count > 1 else demand.place, style="bold")
    large = {what: size for what, size in demand.terms.items() if size >= SMALL_SHARE * demand.total}
    rest = demand.total - sum(large.values())
    shown = {**large, **({"other": rest} if rest else {})}
    rows = []
    for number, (what, size) in enumerate(shown.items()):
        rows.append((name if number == 0 else Text(""), Text(what), f"{size / GIB:,.2f}"))
    mark, style = MARKS["ok" if demand.fits else "missing"]
    of = "in host memory" if demand.limit is None else f"{mark} of {demand.limit / GIB:,.1f} usable"
    rows.append((Text(""), Text(of, style="dim" if demand.limit is None else style), f"{demand.total / GIB:,.2f}"))
    return rows


def _millions(count: int) -> str:
    return f"{count / 1e9:,.2f}B" if count >= 1e9 else f"{count / 1e6:,.1f}M"


def _as_json(checks: list[Check], sized: Sized | None) -> dict[str, object]:
    shown: dict[str, object] = {"checks": [asdict(check) for check in checks]}
    if sized is not None:
        models, machine, planned, found = sized
        shown["parameters"] = {name: shape.parameters for name, shape in models.items()}
        shown["machine"] = asdict(machine)
        shown["fits"] = planned.fits
        shown["gpus"] = {"asked": planned.gpus, "there": planned.gpus_there}
        shown["memory"] = [
            {
                **asdict(demand),
                "total": demand.total,
                "fits": demand.fits,
                "remedies": [{"settings": each.settings, "total": each.total} for each in found.get(demand.place, [])],
            }
            for demand in planned.demands
        ]
    return shown
