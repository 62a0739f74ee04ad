"""`areal train --config FILE a.b=c …`: train an agent; what the example scripts do."""

import argparse
import os
import sys
from pathlib import Path

from areal.api.errors import ConfigError
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config
from areal.infra.scheduler.slurm import JOB_VARIABLE, allocation_options


def run(args: argparse.Namespace) -> int:
    words = (["--config", args.config] if args.config else []) + args.overrides
    config, _ = load_expr_config(words, GRPOConfig)
    if not config.workflow and config.rollout.agent.mode == "online":
        config.workflow = "areal.rollout.runners.online.OutsideAgent"
    if not config.workflow:
        raise ConfigError("workflow must name the agent to train; add workflow=my_module.MyAgent")
    if config.scheduler.type == "slurm" and JOB_VARIABLE not in os.environ:
        return _submit(words, config)
    from areal.trainer.ppo import PPOTrainer

    with PPOTrainer(config) as trainer:
        trainer.train(workflow=config.workflow)
    return 0


def _submit(words: list[str], config: GRPOConfig) -> int:
    """Outside an allocation: the same command as a batch job, in which the driver runs on the first node."""
    from areal.cli.submit import submit
    from areal.trainer.fleet import all_asks

    options = [*allocation_options(all_asks(config), config.scheduler.nodes), *config.scheduler.slurm_arguments]
    return submit([sys.executable, "-m", "areal.cli.main", "train", *words], options, Path(config.output_dir))
