"""`areal status RUN`: what each part of a run does or waits for, since when, and until when at most."""

import argparse
import json
from pathlib import Path

from areal.api.errors import ConfigError
from areal.trainer.run_state import report_of
from areal.trainer.status import lines_of
from areal.utils.shorten import printable

FINISHED, RESUMABLE, SILENT = 3, 4, 5
"""Exit codes, besides 0 of a run that runs."""


def run(args: argparse.Namespace) -> int:
    directory = Path(args.run)
    if not (directory / "config.yaml").exists():
        raise ConfigError(
            f"a run's directory has a config.yaml, {directory} has none; give output_dir/experiment/trial"
        )
    report = report_of(directory)
    if args.json:
        print(json.dumps(report, indent=2), file=args.stdout)
    elif "parts" in report:
        print(printable("\n".join(lines_of(report))))
    else:
        print(printable(report["text"]))
    return {"running": 0, "finished": FINISHED, "silent": SILENT}.get(report["state"], RESUMABLE)
