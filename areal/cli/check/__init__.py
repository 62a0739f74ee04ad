"""`areal check my_module.MyAgent --data sample.jsonl`: find what would go wrong in training, in seconds.

Ends with 0 if nothing was found, 1 with findings, 2 if there is nothing to check.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

from areal.api.errors import ConfigError
from areal.config.yaml import Verbatim

FOUND = 1


def run(args: argparse.Namespace) -> int:
    if "" not in sys.path:  # a console script, unlike python itself, does not look where it was started
        sys.path.insert(0, "")
    if args.n < 1:
        raise ConfigError(f"--n must be >= 1 episodes at once, got {args.n}")
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be > 0 seconds, got {args.timeout:g}")
    from areal.cli.check.play import check
    from areal.rollout.loading import WorkflowSpec
    from areal.rollout.loading import check as refuse_early

    spec = WorkflowSpec(args.workflow, _arguments(args.arguments))
    refuse_early(spec)
    tasks = _tasks(args.data)[: args.n]
    report = asyncio.run(check(spec, tasks, engine=args.engine, mode=args.mode, episodes=args.n, seconds=args.timeout))
    if args.json:
        print(json.dumps({**asdict(report), "passed": report.passed}, indent=2))
    else:
        from rich.console import Console

        from areal.cli.check.report import show

        show(report, Console(highlight=False))
    return 0 if report.passed else FOUND


def _tasks(path: str) -> list[dict[str, Any]]:
    from areal.config.experiment import DatasetConfig
    from areal.dataset import get_custom_dataset

    return get_custom_dataset("train", DatasetConfig(path=path))


def _arguments(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    wrong = [name for name, equals, _ in pairs if not equals or not name.isidentifier()]
    if wrong:
        raise ConfigError(f"constructor arguments are written NAME=VALUE, got {wrong[0]!r}")
    return {name: Verbatim(text).parsed() for name, _, text in pairs}
