"""Train a model on pairs of answers: `python3 examples/dpo/train.py --config examples/dpo/config.yaml`."""

import sys

from areal import DPOTrainer
from areal.api.cli_args import DPOConfig, load_expr_config
from areal.cli.main import guard


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, DPOConfig)
    with DPOTrainer(config) as trainer:
        trainer.train()


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))
