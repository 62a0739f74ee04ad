"""Make the teacher of this example, by supervised training: `python3 examples/distillation/teacher.py`.

It takes settings as the other examples do. Any model with the student's tokenizer can be a teacher.
"""

import sys

from areal import SFTTrainer
from areal.api.cli_args import SFTConfig, load_expr_config
from areal.cli.main import guard

SETTINGS = [
    "experiment_name=sort-digits-teacher",
    "trial_name=one",
    "total_train_steps=80",
    "train_dataset.path=builtin:sort-digits",
    "train_dataset.batch_size=128",
]


def main(argv: list[str]) -> None:
    config, _ = load_expr_config([*SETTINGS, *argv], SFTConfig)
    with SFTTrainer(config) as trainer:
        trainer.train()


if __name__ == "__main__":
    sys.exit(guard(main, sys.argv[1:]))
