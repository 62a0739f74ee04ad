"""Train a reward model: `python3 examples/reward_model/train.py --config examples/reward_model/config.yaml`."""

import sys

from areal import RewardTrainer
from areal.api.cli_args import RewardConfig, load_expr_config
from areal.cli.main import guard


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, RewardConfig)
    with RewardTrainer(config) as trainer:
        trainer.train()


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))
