"""`python3 realhf/training/main_async_ppo.py my_param=5.0`: train the agent that a config names, by PPO.

A script with a config of its own ends with `sys.exit(main(MyConfig))`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: Python then looks for modules next to this file, not next to `realhf`
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import realhf.impl.agent
import realhf.impl.environment  # noqa: F401
from areal.cli.main import guard
from areal.config.experiment import GRPOConfig
from areal.config.loader import load_expr_config, to_dict
from areal.utils.logging import getLogger
from realhf.api.core.agent_api import AGENTS, ENVIRONMENTS, constructor_arguments
from realhf.experiments.async_exp.async_math_ppo import AsyncPPOMATHConfig

NOTICE = (
    "realhf is the older interface and keeps working; new agents are written as `async def run(self, data, ...)`, with "
    "`areal train workflow=my_module.MyAgent` (docs/legacy.md)"
)
HELP = """\
usage: {program} [--config FILE.yaml] [KEY=VALUE ...]

Train an agent of the older interface by PPO; by default, the built-in model on the built-in task.

settings of {name}, with their defaults:
{settings}
and every setting of areal: total_train_steps=3, actor.path=DIR, actor.optimizer.lr=1e-4, gconfig.n_samples=8,
rollout.max_head_offpolicyness=2, train_dataset.batch_size=16, … (docs/legacy.md)"""


def main(config_class: type[Any] = AsyncPPOMATHConfig, argv: Sequence[str] | None = None) -> int:
    """Train as the config and the command line say; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(_help(config_class))
        return 0
    return guard(_train, config_class, words)


def _train(config_class: type[Any], words: list[str]) -> None:
    config, _ = load_expr_config(words, config_class)
    arguments = workflow_arguments(config)
    getLogger("realhf").warning(NOTICE)
    from areal.trainer.trainers import PPOTrainer  # here, so that help and wrong settings need no torch
    from realhf.episode import LegacyWorkflow

    with PPOTrainer(config) as trainer:
        trainer.train(workflow=LegacyWorkflow, workflow_kwargs=arguments)


def workflow_arguments(config: Any) -> dict[str, Any]:
    """The classes that the config names and their arguments; refuses those that cannot be constructed."""
    arguments: dict[str, Any] = {"turn_discount": config.rollout.agent.turn_discount}
    for key, registry, named in (("agent", AGENTS, config.agent), ("env", ENVIRONMENTS, config.env)):
        cls = registry.find(named.type_)
        constructor_arguments(cls, named.args, {"gconfig": None, "tokenizer": None})
        arguments |= {key: cls, f"{key}_args": named.args}
    return arguments


def _help(config_class: type[Any]) -> str:
    shared = {each.name for each in fields(GRPOConfig)}
    own = {name: value for name, value in to_dict(config_class()).items() if name not in shared}
    settings = "".join(f"  {name}={value}\n" for name, value in _dotted(own))
    return HELP.format(program=Path(sys.argv[0]).name, name=config_class.__name__, settings=settings)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


if __name__ == "__main__":
    sys.exit(main())
