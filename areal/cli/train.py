"""`areal train --config FILE a.b=c …`: train an agent; what the example scripts do."""

import argparse

from areal.api.errors import ConfigError
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config


def run(args: argparse.Namespace) -> int:
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
