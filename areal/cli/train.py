"""`areal train --config FILE a.b=c …`: train an agent; what the example scripts do.

`--demo` is the config of examples/agent_workflow, which is in the package too.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from areal.api.errors import ConfigError
from areal.config.errors import require
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config
from areal.trainer.trainers import PPOTrainer

DEMO = Path(__file__).with_name("demo.yaml")
"""A link to the example's own in a checkout, a copy of it in a wheel."""


def run(args: argparse.Namespace) -> int:
    words = _config_words(args) + args.overrides + ["quiet=true"] * args.quiet
    config, _ = load_expr_config(words, GRPOConfig)
    if not config.workflow and config.rollout.agent.mode == "online":
        config.workflow = "areal.rollout.runners.online.OutsideAgent"
    if not config.workflow:
        raise ConfigError(
            "workflow must name the agent to train; add workflow=my_module.MyAgent, or see it run first: "
            "areal train --demo"
        )
    if args.dry_run:
        return _show_plan(config, args)
    require(not args.json, "--json is for --dry-run; a run writes its figures to metrics.jsonl in its directory")
    if config.scheduler.type == "slurm":
        from areal.infra.scheduler.slurm import JOB_VARIABLE  # with all that talks to other hosts

        if JOB_VARIABLE not in os.environ:
            return _submit(words, config)
    with PPOTrainer(config) as trainer:
        trainer.train(workflow=config.workflow)
    return 0


def _show_plan(config: GRPOConfig, args: argparse.Namespace) -> int:
    """Raises ArealError if the run could not be started."""
    from areal.trainer.dry_run import plan_run

    planned = plan_run(config)
    if args.json:
        print(json.dumps(planned.as_json()), file=args.stdout)
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, said in planned.facts().items():
        grid.add_row(Text(name, style="bold"), Text(said))
    console = Console(highlight=False)
    console.print(grid)
    console.print("nothing was started; without --dry-run it is", style="dim")
    return 0


def _config_words(args: argparse.Namespace) -> list[str]:
    if args.demo and args.config:
        raise ConfigError(f"--demo has a config of its own, got --config {args.config} too; leave one out")
    path = str(DEMO) if args.demo else args.config
    return ["--config", path] if path else []


def _submit(words: list[str], config: GRPOConfig) -> int:
    """Outside an allocation: the same command as a batch job, in which the driver runs on the first node."""
    from areal.cli.submit import submit
    from areal.infra.scheduler.slurm import allocation_options
    from areal.trainer.fleet import all_asks

    options = [*allocation_options(all_asks(config), config.scheduler.nodes), *config.scheduler.slurm_arguments]
    return submit([sys.executable, "-m", "areal.cli.main", "train", *words], options, Path(config.output_dir))
