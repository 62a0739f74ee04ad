"""A trace of a run that was made: its episodes as they were, and how fast its parts turned out to be.

Speeds are read from the run's own files. With c requests at the engine a token takes `fixed + c * shared` seconds: the
mean over all calls and that of the quickest ones, which had the engine nearly to themselves, give both.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areal.api.errors import TraceError
from areal.simulation.trace import ClientSpeed, EngineSpeed, Trace, TrainerSpeed, Turn

QUICKEST = 0.02
"""Share of the calls that are taken to have been alone."""

Call = tuple[float, float, int]
"""Asked and answered, in seconds of the episode; tokens."""


def record(run: str | Path) -> Trace:
    """The trace of a finished run's directory. Raises TraceError."""
    place = Path(run)
    try:
        summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        episodes = list(_lines(place / "rollouts.jsonl"))
        steps = [row for row in _lines(place / "metrics.jsonl") if "step_seconds" in row]
    except OSError as error:
        raise TraceError(f"{str(place)!r} is not the directory of a finished run: {error.strerror}") from None
    calls = [[(asked, answered, tokens) for asked, answered, tokens in each["turns"]] for each in episodes]
    if not any(calls) or not steps:
        raise TraceError(f"{str(place)!r} recorded no call of the model, or no step; simulate needs both")
    workers = [cpu for name, cpu in summary["cpu_seconds"].items() if "worker" in name]
    trained = sum(row["tokens"] for row in steps)
    return Trace(
        [_turns(each) for each in calls if each],
        _engine(calls, summary["generating_seconds"]),
        ClientSpeed(sum(workers) / max(1, summary["calls"])),
        TrainerSpeed(trained / sum(row["step_seconds"] - row["wait_seconds"] for row in steps)),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _turns(calls: Sequence[Call]) -> list[Turn]:
    """An agent waited for something else from the last answer that it had to the next question."""
    turns, answered_last = [], 0.0
    for asked, answered, tokens in sorted(calls):
        turns.append(Turn(max(0.0, asked - answered_last), tokens))
        answered_last = max(answered_last, answered)
    return turns


def _engine(episodes: Sequence[Sequence[Call]], generating_seconds: float) -> EngineSpeed:
    calls = [call for each in episodes for call in each if call[2]]
    per_token = sorted((answered - asked) / tokens for asked, answered, tokens in calls)
    quick, mean = per_token[int(len(per_token) * QUICKEST)], sum(per_token) / len(per_token)
    company = sum(answered - asked for asked, answered, _ in calls) / generating_seconds  # Little's law
    shared = max((mean - quick) / max(1.0, company - 1), 1e-9)
    return EngineSpeed(1 / max(quick - shared, 1e-9), 1 / shared)
