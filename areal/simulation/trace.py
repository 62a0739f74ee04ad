"""What a simulation is fed with: how episodes look, and how fast the parts are.

A trace is read from JSON, synthetic (`read_trace`), or recorded from the files of a finished run (`record`). As JSON
(every speed may be left out; see the fields for their defaults):

    {"episodes": [[{"wait_seconds": 0.3, "tokens": 40}, …], …],
     "engine": {"alone_tokens_per_second": 30, "full_tokens_per_second": 250, "swap_seconds": 0.1},
     "client": {"call_seconds": 0.002},
     "trainer": {"tokens_per_second": 2000, "step_seconds": 0.1}}
"""

import dataclasses
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from areal.api.errors import TraceError
from areal.utils.shorten import shown

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """One call of the model, and what the agent waited for before it (a tool, a person, another service)."""

    wait_seconds: float
    tokens: float
    """Sampled; prefill counts as the decoded tokens that cost as much."""


@dataclass(frozen=True)
class EngineSpeed:
    alone_tokens_per_second: float = 50.0
    """A request with the engine to itself."""
    full_tokens_per_second: float = 2000.0
    """All requests together when there are very many."""
    swap_seconds: float = 0.0
    """How long new weights stop it."""
    recompute_token_seconds: float = 0.0
    """What it takes to compute a token again, of a prompt or an answer that another engine had begun."""


@dataclass(frozen=True)
class ClientSpeed:
    call_seconds: float = 0.0
    """Processor time that one call costs the worker process that runs the agent."""
    token_seconds: float = 0.0
    """The same for each token of its answer."""


@dataclass(frozen=True)
class TrainerSpeed:
    tokens_per_second: float = 10_000.0
    """Sampled tokens that one trainer learns from."""
    step_seconds: float = 0.0
    """What a step costs in addition to its tokens, however many trainers there are."""


@dataclass(frozen=True)
class Trace:
    episodes: list[list[Turn]]
    engine: EngineSpeed = field(default_factory=EngineSpeed)
    client: ClientSpeed = field(default_factory=ClientSpeed)
    trainer: TrainerSpeed = field(default_factory=TrainerSpeed)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")


def read_trace(source: str) -> Trace:
    """A JSON file, or `lognormal:mean=0.5,sigma=1.0,tokens=200,turns=3,spread=0.5`. Raises TraceError."""
    if source.startswith("lognormal:"):
        return _synthetic(source.removeprefix("lognormal:"))
    try:
        content = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"cannot read a trace from {source!r}: {error.strerror}; or use lognormal:…") from None
    except ValueError as error:
        raise TraceError(f"{source} is not JSON: {error}") from None
    if not isinstance(content, dict) or not content.get("episodes"):
        raise TraceError(f'{source} must be an object with "episodes", a list of lists of turns')
    parts = {"engine": EngineSpeed, "client": ClientSpeed, "trainer": TrainerSpeed}
    if unknown := sorted(set(content) - {"episodes", *parts}):
        raise TraceError(f"{source} has no use for {', '.join(unknown)}; it knows episodes, {', '.join(parts)}")
    episodes = [
        [numbers_of(Turn, turn, f"episode {number}") for turn in _turns(turns, number)]
        for number, turns in enumerate(content["episodes"])
    ]
    return Trace(episodes, **{name: numbers_of(kind, content.get(name, {}), name) for name, kind in parts.items()})


def _turns(turns: Any, number: int) -> list[Any]:
    if not isinstance(turns, list) or not turns:
        raise TraceError(f"an episode must be a list of at least one turn, episode {number} is {turns!r:.80}")
    return turns


def numbers_of(kind: type[T], values: Any, where: str) -> T:
    """A dataclass of numbers from an object; all of them finite and none negative. A few fields are booleans."""
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise TraceError(f"{where} must be an object with {', '.join(names)}, got {values!r:.80}")
    for name, value in values.items():
        if name not in names:
            raise TraceError(f"{where} has no {name!r}; it has {', '.join(names)}")
        if isinstance(getattr(kind, name, None), bool):
            if not isinstance(value, bool):
                raise TraceError(f"{where}: {name} must be true or false, got {value!r:.80}")
            continue
        if not _is_amount(value):
            raise TraceError(f"{where}: {name} must be a number >= 0, got {value!r:.80}")
        if name.endswith("_per_second") and value == 0:
            raise TraceError(f"{where}: {name} must be > 0, got 0; nothing would ever end")
    try:
        return kind(**values)
    except TypeError:
        raise TraceError(f"{where} needs {', '.join(names)}, got {', '.join(values) or 'nothing'}") from None


def _synthetic(words: str) -> Trace:
    """Waits, and with a `spread` also lengths, drawn from lognormal distributions of that mean; the same every time."""
    given = {"mean": 0.5, "sigma": 1.0, "tokens": 200.0, "turns": 1.0, "spread": 0.0}
    names = ", ".join(given)
    for word in filter(None, words.split(",")):
        name, _, text = word.partition("=")
        try:
            given[name] = float(text)
        except ValueError:
            raise TraceError(f"lognormal: {name} must be a number, got {text!r}") from None
    if unknown := sorted(set(given) - set(names.split(", "))):
        raise TraceError(f"lognormal: has no {', '.join(unknown)}; it has {names}")
    finite = all(map(math.isfinite, given.values()))
    least = min(given["sigma"], given["spread"])
    if not finite or min(given["mean"], given["tokens"]) <= 0 or given["turns"] < 1 or least < 0:
        raise TraceError(f"lognormal: needs mean > 0, tokens > 0, turns >= 1, sigma >= 0, spread >= 0, got {words}")
    wait, length = random.Random(0), random.Random(1)

    def turn() -> Turn:
        tokens = _lognormal(length, given["tokens"], given["spread"]) if given["spread"] else given["tokens"]
        return Turn(_lognormal(wait, given["mean"], given["sigma"]), tokens)

    return Trace([[turn() for _ in range(int(given["turns"]))] for _ in range(4096)])


def _lognormal(draw: random.Random, mean: float, sigma: float) -> float:
    return draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


QUICKEST = 0.02
"""Share of the calls that are taken to have had the engine to themselves."""

RecordedCall = tuple[float, float, int]
"""Asked and answered, in seconds of the episode; tokens."""


def record(run: str | Path) -> Trace:
    """The trace of a finished run: its episodes as they were, and how fast its parts turned out to be.

    Raises TraceError if `run` is not the directory of one, or if one of its files is damaged.
    """
    place = Path(run)
    try:
        summary = _summary(place / "summary.json")
        calls = [_recorded_calls(row["turns"], where) for where, row in _lines(place / "rollouts.jsonl", "turns")]
        steps = [
            [_amount(row, name, where) for name in ("tokens", "step_seconds", "wait_seconds")]
            for where, row in _lines(place / "metrics.jsonl")
            if "step_seconds" in row
        ]
    except OSError as error:
        raise TraceError(f"{str(place)!r} is not the directory of a finished run: {error.strerror}") from None
    trained, seconds = sum(tokens for tokens, _, _ in steps), sum(step - wait for _, step, wait in steps)
    if not any(tokens for each in calls for *_, tokens in each) or seconds <= 0 or not trained:
        raise TraceError(f"{str(place)!r} recorded no call of the model, or no step; simulate needs both")
    workers = [
        _amount(summary["cpu_seconds"], name, "summary.json") for name in summary["cpu_seconds"] if "worker" in name
    ]
    return Trace(
        [_recorded_turns(each) for each in calls if each],
        _engine(calls, summary["generating_seconds"]),
        ClientSpeed(sum(workers) / max(1, summary["calls"])),
        TrainerSpeed(trained / seconds),
    )


def _summary(path: Path) -> dict[str, Any]:
    """What a finished run says of itself, with the fields that are needed here."""
    try:
        summary = json.loads(path.read_bytes())
    except ValueError:  # also for bytes that are not UTF-8
        summary = None
    fields = ("generating_seconds", "calls", "cpu_seconds")
    if not isinstance(summary, dict) or not isinstance(summary.get("cpu_seconds"), dict):
        raise TraceError(f"{path} must be a JSON object with {', '.join(fields)}, and is damaged; take another run")
    _amount(summary, "calls", str(path))
    if not _amount(summary, "generating_seconds", str(path)):
        raise TraceError(f"{path}: generating_seconds must be > 0, got 0; simulate needs a run that called the model")
    return summary


def _lines(path: Path, *needed: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line, and where it is."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:  # also for bytes that are not UTF-8
                row = None
            where = f"line {number} of {path}"
            if not isinstance(row, dict) or not row.keys() >= set(needed):
                what = " ".join(["a JSON object", *(f"with {name}" for name in needed)])
                raise TraceError(f"{where} must be {what}, got {shown(line, 80)}; remove it")
            yield where, row


def _amount(values: dict[str, Any], name: str, where: str) -> float:
    value = values.get(name)
    if not _is_amount(value):
        raise TraceError(f"{where}: {name} must be a number >= 0, got {shown(value, 80)}")
    return float(value)


def _is_amount(value: Any) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max  # also for integers that no float can hold


def _recorded_calls(turns: Any, where: str) -> list[RecordedCall]:
    wrong = [turns] if not isinstance(turns, list) else [each for each in turns if not _is_call(each)]
    if wrong:
        raise TraceError(
            f"{where}: turns must be a list of [asked, answered, tokens], got {shown(wrong[0], 80)}; remove the line"
        )
    return [(asked, answered, tokens) for asked, answered, tokens in turns]


def _is_call(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 3 and all(map(_is_amount, turn)) and turn[0] <= turn[1]


def _recorded_turns(calls: Sequence[RecordedCall]) -> list[Turn]:
    """From one answer to the next question, an agent waited for something else."""
    turns, answered_last = [], 0.0
    for asked, answered, tokens in sorted(calls):
        turns.append(Turn(max(0.0, asked - answered_last), tokens))
        answered_last = max(answered_last, answered)
    return turns


def _engine(episodes: Sequence[Sequence[RecordedCall]], generating_seconds: float) -> EngineSpeed:
    """With c requests at the engine a token takes `fixed + c * shared` seconds.

    The mean over all calls, and that of the quickest ones, which had the engine nearly to themselves, give both.
    """
    calls = [call for each in episodes for call in each if call[2]]
    per_token = sorted((answered - asked) / tokens for asked, answered, tokens in calls)
    quick, mean = per_token[int(len(per_token) * QUICKEST)], sum(per_token) / len(per_token)
    at_once = sum(answered - asked for asked, answered, _ in calls) / generating_seconds  # Little's law
    shared = max((mean - quick) / max(1.0, at_once - 1), 1e-9)
    return EngineSpeed(1 / max(quick - shared, 1e-9), 1 / shared)
