"""`areal train --config FILE a.b=c …`: the verb behind the example script."""

import argparse
import sys

from areal.api.errors import ConfigError
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config


def run(args: argparse.Namespace) -> int:
    if "" not in sys.path:  # a console script, unlike python itself, does not look where it was started
        sys.path.insert(0, "")
    words = (["--config", args.config] if args.config else []) + args.overrides
    config, _ = load_expr_config(words, GRPOConfig)
    if not config.workflow and config.rollout.agent.mode == "online":
        config.workflow = "areal.rollout.runners.online.OutsideAgent"
    if not config.workflow:
        raise ConfigError("workflow must name the agent to train; add workflow=my_module.MyAgent")
    from areal.trainer.ppo import PPOTrainer

    with PPOTrainer(config) as trainer:
        trainer.train(workflow=config.workflow)
    return 0
