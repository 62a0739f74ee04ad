"""`areal rescore RUN --reward module.function`: what another reward function would have said of a run's episodes."""

import argparse
import asyncio
import json
from pathlib import Path

from areal.config.errors import require
from areal.rollout.loading import import_object
from areal.store.filters import parse_filter
from areal.utils.shorten import plural
from areal.viewer.frame import number
from areal.viewer.rescoring import place_for, rescore, write_rescored


def run(args: argparse.Namespace) -> int:
    require(args.timeout > 0, f"--timeout must be > 0, got {args.timeout:g}")
    chosen, directory = parse_filter(args.filter), Path(args.run)
    name = args.name or args.reward
    path = place_for(directory, name, force=args.force)
    function = import_object(args.reward, "--reward")
    require(callable(function), f"--reward must name a function, {args.reward} is a {type(function).__name__}")
    found = asyncio.run(
        rescore(
            directory,
            function,
            name=name,
            reward_name=args.reward,
            chosen=chosen,
            words=args.filter,
            timeout_seconds=args.timeout,
        )
    )
    write_rescored(path, found)
    old, new = found.means()
    gained, lost = len(found.gained), len(found.lost)
    if args.json:
        counts = {"episodes": len(found.episodes), "changed": found.changed, "failures": found.failures}
        groups = {"groups": found.groups, "gained": gained, "lost": lost}
        print(json.dumps({"path": str(path), "old": old, "new": new, **counts, **groups}), file=args.stdout)
        return 0
    failures = [each.failure for each in found.episodes if each.new is None]
    failed = f"; {len(failures):,} failed, such as: {failures[0]}" if failures else ""
    scored = plural(len(found.episodes), "episode")
    print(f"{scored}: mean reward {number(old)} → {number(new)}, {found.changed:,} changed{failed}")
    print(f"of {plural(found.groups, 'group')}, {gained:,} would gain a signal and {lost:,} would lose it")
    print(f"{path}; areal view {directory} shows it")
    return 0
