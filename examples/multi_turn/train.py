"""Train a model to try again: `python3 examples/multi_turn/train.py --config examples/multi_turn/config.yaml`.

Shows how a script adds a setting of its own: `max_turns` works in the config and on the command line like any other.
"""

import sys
from dataclasses import dataclass

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.cli.main import guard


@dataclass
class MultiTurnConfig(GRPOConfig):
    max_turns: int = 2
    """Tries for each question."""


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, MultiTurnConfig)
    tries = {"max_turns": config.max_turns, "turn_discount": config.rollout.agent.turn_discount}
    with PPOTrainer(config) as trainer:
        trainer.train(workflow=config.workflow, workflow_kwargs=tries)


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))
