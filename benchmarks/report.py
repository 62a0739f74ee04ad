"""How every benchmark reports: lines for people, then one JSON object with the figures and aims on the last line."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Aim:
    aim: str
    value: float
    target: float
    met: bool

    @classmethod
    def at_least(cls, aim: str, value: float, target: float) -> "Aim":
        return cls(aim, value, target, value >= target)

    @classmethod
    def at_most(cls, aim: str, value: float, target: float) -> "Aim":
        return cls(aim, value, target, value <= target)


def main(
    doc: str, run: Callable[[], tuple[dict[str, Any], list[Aim]]], parser: argparse.ArgumentParser | None = None
) -> None:
    """Run a benchmark and print its report; `--json` leaves out the lines for people. `parser` may add options."""
    parser = parser or argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object on standard output")
    quiet = parser.parse_args().json
    figures, aims = run()
    if not quiet:
        for aim in aims:
            print(f"{'met   ' if aim.met else 'missed'}  {aim.aim}: {aim.value:.3g} (target {aim.target:.3g})")
    print(json.dumps({**figures, "aims": [asdict(aim) for aim in aims]}))
