"""Which runs there are, and what a list says of each: its state, how far it is, what it has learnt, how it is set up.

A run is a directory with a run store. It is known by a name for addresses and files, made of harmless characters, so
that no request can name a path.
"""

import json
import os
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from areal.api.errors import ArealError
from areal.config.loader import build
from areal.store.schema import STORE_FILE, StoreError
from areal.store.search import StoreSearch
from areal.trainer.evaluation import Evaluation, verdict
from areal.trainer.run_state import state_of
from areal.utils.bounded_cache import BoundedCache
from areal.utils.shorten import duration, first_line
from areal.viewer.html import visible

DEPTHS = ("*/", "*/*/", "*/*/*/")
"""Where stores lie below what `areal view` is given: output_dir, one of its experiments, or what holds several."""
REMEMBERED = 500
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
NAMES = ("experiment_name", "trial_name", "output_dir")
"""Settings that differ in every run and tell nothing."""

Config = dict[str, Any]
"""Settings by their dotted names."""


@dataclass(frozen=True)
class Run:
    slug: str
    """Its name in addresses."""
    name: str
    directory: Path

    @property
    def experiment(self) -> Path:
        return self.directory.parent

    def search(self) -> StoreSearch:
        return StoreSearch(self.directory, at_rest=True)


@dataclass(frozen=True)
class HeldOut:
    """What evaluations measured, sampled ones: the first, and the latest if there was another."""

    before: Evaluation
    after: Evaluation | None


@dataclass(frozen=True)
class RunFacts:
    run: Run
    state: str
    """running, finished, failed, stopped or killed; unreadable = its store is damaged, or of another version."""
    step: int = 0
    total_steps: int | None = None
    began: float | None = None
    seconds: float | None = None
    verdict: str = ""
    held_out: HeldOut | None = None
    rewards: list[float] = field(default_factory=list)
    """Of each step."""
    config: Config = field(default_factory=dict)
    failure: str | None = None
    """The error that ended it."""


class Runs:
    """The runs below some directories, found anew whenever somebody asks."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = [place.absolute() for place in places]
        self._known: BoundedCache[Path, tuple[object, RunFacts]] = BoundedCache(REMEMBERED)
        self._lock = Lock()

    def find(self) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for place in self._places:
            for directory in _directories(place):
                name = visible("/".join(directory.parts[-2:]))
                slug = base = UNSAFE.sub("-", name.replace("/", ".")).strip(".-") or "run"
                number = 2
                while slug in found:
                    slug, number = f"{base}-{number}", number + 1
                if all(each.directory != directory for each in found.values()):
                    found[slug] = Run(slug, name, directory)
        return found

    def facts(self, run: Run) -> RunFacts:
        """Read again only if its files have changed."""
        state, mark = state_of(run.directory), _mark(run.directory)
        with self._lock:
            known = self._known.get(run.directory)
        if known is not None and known[0] == (state, mark) and known[1].run == run:
            return known[1]
        facts = read_facts(run, state)
        with self._lock:
            self._known.put(run.directory, ((state, mark), facts))
        return facts


def read_facts(run: Run, state: str) -> RunFacts:
    try:
        with run.search() as store:
            return _facts_of(run, state, store)
    except (StoreError, sqlite3.Error) as error:
        return RunFacts(run, "unreadable", verdict=first_line(error))


def _facts_of(run: Run, state: str, store: StoreSearch) -> RunFacts:
    meta, sessions = store.meta(), store.sessions()
    lines = list(store.metrics())
    held_out = held_out_of(store)
    seconds = max((line["time_seconds"] for line in lines if line.get("time_seconds") is not None), default=None)
    rewards, losses = (
        [float(line[name]) for line in lines if line.get(name) is not None] for name in ("reward", "loss")
    )
    last = max((line["step"] for line in lines), default=0)
    return RunFacts(
        run=run,
        state=state,
        step=last,
        total_steps=meta.get("total_steps"),
        began=sessions[0]["began"] if sessions else None,
        seconds=seconds,
        verdict=_verdict(run.directory, held_out, rewards, losses, seconds),
        held_out=held_out,
        rewards=rewards,
        config=flat(meta.get("config") or {}),
        failure=store.failure() if state == "failed" else None,
    )


def held_out_of(store: StoreSearch) -> HeldOut | None:
    found = [each for each in store.evaluations() if not str(each.get("key", "")).endswith("_greedy")]
    try:
        evaluations = [build(Evaluation, each["result"]) for each in found]
    except (ArealError, KeyError):  # of a version that knew other figures
        return None
    return HeldOut(evaluations[0], evaluations[-1] if len(evaluations) > 1 else None) if evaluations else None


def _verdict(
    directory: Path,
    held_out: HeldOut | None,
    rewards: Sequence[float],
    losses: Sequence[float],
    seconds: float | None,
) -> str:
    """In one sentence; what the run itself said at its end is not said in other words."""
    try:
        said = json.loads((directory / "summary.json").read_text(encoding="utf-8")).get("verdict")
    except (OSError, ValueError, AttributeError):
        said = None
    if said:
        return str(said)
    if held_out is not None and held_out.after is not None:
        return verdict(held_out.before, held_out.after, seconds or 0.0)
    taken = f" in {duration(seconds)}" if seconds else ""
    if not rewards:  # supervised training has none
        return f"loss {_change(losses)}{taken}" if losses else "no step has been trained yet"
    before = f"; held out: {held_out.before.reward:.2f} before the first step" if held_out else "; nothing was held out"
    return f"reward {_change(rewards)}{taken}{before}"


def _change(values: Sequence[float]) -> str:
    """From the mean of the first tenth to that of the last."""
    few = max(1, len(values) // 10)
    first, last = (sum(part) / len(part) for part in (values[:few], values[-few:]))
    return f"{first:.2f} → {last:.2f} over {len(values)} steps" if len(values) > 1 else f"{first:.2f} in the first step"


def flat(config: Mapping[str, Any], prefix: str = "") -> Config:
    found: Config = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
    return found


def differences(configs: Sequence[Config]) -> list[str]:
    """The settings that are not the same in all of them."""
    names = dict.fromkeys(name for config in configs for name in config)
    missing = object()
    return [
        name
        for name in names
        if name not in NAMES and any(config.get(name, missing) != configs[0].get(name, missing) for config in configs)
    ]


def _directories(place: Path) -> list[Path]:
    if (place / STORE_FILE).is_file():
        return [place]
    return sorted({path.parent for depth in DEPTHS for path in place.glob(depth + STORE_FILE)})


def _mark(directory: Path) -> tuple[tuple[int, int] | None, ...]:
    """Changes whenever something of a run is written."""
    return tuple(_stamp(directory / name) for name in (STORE_FILE, f"{STORE_FILE}-wal", "summary.json"))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
