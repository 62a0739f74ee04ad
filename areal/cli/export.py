"""`areal export RUN --format jsonl`: the episodes and metrics of a run, from its store to files for other programs."""

import argparse
import json
from pathlib import Path

from areal.store.export import EVERY_STEP, export
from areal.store.filters import FilterError, parse_filter, parse_range
from areal.store.schema import DAMAGE, StoreError
from areal.store.search import StoreSearch


def run(args: argparse.Namespace) -> int:
    chosen, steps = parse_filter(args.filter), EVERY_STEP
    if args.steps is not None:
        try:
            steps = parse_range(args.steps)
        except FilterError as error:
            raise FilterError(f"--steps: {error}") from None
        chosen &= parse_filter(f"step:{args.steps}")
    directory = Path(args.run)
    with StoreSearch(directory) as store:
        out = directory / "export" if args.out is None else Path(args.out)
        try:
            exported = export(store, out, args.format, chosen=chosen, steps=steps, force=args.force)
        except DAMAGE as error:
            raise StoreError(f"{store.path} is damaged: {error}; put a copy back, or leave out its steps") from error
    if args.json:
        print(
            json.dumps({"files": [{"path": str(each.path), "rows": each.rows} for each in exported]}), file=args.stdout
        )
        return 0
    for written in exported:
        print(f"{written.rows:>9}  {written.path}")
    return 0
