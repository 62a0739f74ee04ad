"""`areal replay RUN`: take a run's steps again from its stored batches, and compare the weights step by step.

With `--regenerate` what a synchronous run sampled is sampled again too.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from areal.api.errors import ConfigError
from areal.trainer.display import Progress
from areal.trainer.replay import Replay, ReplayOutcome, Taken

DIVERGED = 1


def run(args: argparse.Namespace) -> int:
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads must be >= 1, got {args.threads}; leave it out for the run's own")
    if args.regenerate and (args.start is not None or args.threads is not None):
        raise ConfigError("--regenerate begins at the start with the run's own threads; leave out --from and --threads")
    outcome = _regenerate(args) if args.regenerate else _replay(args)
    print(json.dumps(outcome.as_json()) if args.json else "\n".join(outcome.lines()), file=args.stdout)
    return DIVERGED if outcome.diverging else 0


def _replay(args: argparse.Namespace) -> ReplayOutcome:
    directory = Path(args.run)
    with Replay(directory, start=args.start, threads=args.threads) as replay:
        outcome = ReplayOutcome(directory, replay.span)
        with Progress(replay.span.last, replay.span.start) as progress:
            if replay.span.note:
                progress.say(replay.span.note)
            for taken in replay.steps():
                outcome.add(taken)
                progress.update(taken.step, {"equal_steps": outcome.bit_equal})
                if args.until_divergence and taken.diverges:
                    break
    return outcome


def _regenerate(args: argparse.Namespace) -> ReplayOutcome:
    """The run that is trained for it shows its own progress."""
    from areal.trainer.regenerate import regenerate

    def goes_on(taken: Taken) -> bool:
        return not (args.until_divergence and taken.diverges)

    with TemporaryDirectory(prefix="areal-regenerated-") as directory:
        return regenerate(Path(args.run), Path(directory), goes_on)
