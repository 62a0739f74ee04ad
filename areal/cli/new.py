"""`areal new workflow NAME` and `areal new agent NAME`: a first version that trains, its export, and its test."""

import argparse
import importlib.util
import sys

from areal.cli.scaffold.plan import make_plan


def run(args: argparse.Namespace) -> int:
    plan = make_plan(args.kind, args.name, args.into, force=args.force)
    print("\n".join([*plan.write(), ""]))
    for verb, line in plan.commands.items():
        print(f"{verb:<12}{line}")
    if importlib.util.find_spec("pytest_asyncio") is None:
        print("its test needs pytest and pytest-asyncio: pip install areal[test]", file=sys.stderr)
    return 0
