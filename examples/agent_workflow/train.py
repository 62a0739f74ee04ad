"""Train what a config names: `python3 examples/agent_workflow/train.py --config examples/agent_workflow/config.yaml`.

The config's `workflow` says what an episode is; any key can be overridden on the command line, `workflow=` too. The
other examples are configs for this script or for `areal train`, which does the same.
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
