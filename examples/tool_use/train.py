"""Train an agent that has a calculator: `python3 examples/tool_use/train.py --config examples/tool_use/config.yaml`.

Any key of the config can be overridden on the command line.
"""

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.cli.main import guard


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    with PPOTrainer(config) as trainer:
        trainer.train(workflow=config.workflow)


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))
