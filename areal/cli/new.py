"""`areal new workflow NAME` and `areal new agent NAME`: a first version that trains, its export, and its test."""

import argparse
import importlib.util
import sys

from areal.cli.scaffold.plan import make_plan


def run(args: argparse.Namespace) -> int:
    plan = make_plan(args.kind, args.name, args.into, force=args.force)
    print("\n".join(plan.write()))
    print(f"\ntrain it    {plan.train_line}")
    print(f"test it     python -m pytest {plan.test}")
    print(f"check it    areal check {plan.import_string}")
    if importlib.util.find_spec("pytest_asyncio") is None:
        print("its test needs pytest and pytest-asyncio: pip install areal[test]", file=sys.stderr)
    return 0
