"""From nothing to a reward that rises: packages, megabytes and seconds, and what peers ask one to install.

Every project is resolved in the same way, in this run: its wheels are fetched beside the same CPU build of torch, and
counted without torch and what only torch needs. That says how much there is besides the framework that all share. Peers
are asked for by name alone; what trains on GPUs with them (vLLM, verl) is more. Only this package is also installed
into an empty environment, and runs `areal train --demo` there until its reward has risen.

Seconds depend on the network, or on what pip has in its cache.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal.utils.installing import DISTRIBUTION, TESTED_TORCH
from benchmarks.peers import outside_variables
from benchmarks.report import Aim, main

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "models", "runs", "site")
PEERS = {"trl": "trl==1.16.0", "verifiers": "verifiers==0.4.0", "agent-lightning": "agentlightning==0.3.0"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
FETCH_SECONDS = 900.0
RUN_SECONDS = 900.0
END_SECONDS = 60.0
LOOK_SECONDS = 0.2
WINDOW = 10
"""Steps whose mean reward is compared with that of the first so many."""
RISE = 0.05
MOST_PACKAGES = 45
MOST_SECONDS = 300.0
"""For all of it, on a quiet machine with a near package index."""


def call(words: Sequence[str | Path], seconds: float = FETCH_SECONDS) -> None:
    """What it prints goes to stderr: stdout is the report's."""
    subprocess.run(words, check=True, timeout=seconds, stdout=sys.stderr, env=clean_variables())


def clean_variables() -> dict[str, str]:
    """Without paths to packages: what pip finds there it takes for installed, and an environment would not be empty."""
    return {name: value for name, value in outside_variables().items() if not name.startswith("PYTHON")}


def own_wheel(place: Path) -> Path:
    """Built from a copy, because a build leaves files among the sources."""
    source = place / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE, symlinks=True)
    call([*PIP, "wheel", "-qq", "--no-deps", "-w", place / "own", source])
    return next((place / "own").glob("*.whl"))


def fetched(requirement: str, place: Path) -> dict[str, Any]:
    """What installing it beside torch fetches; sources are built, so that everything is a wheel."""
    call([*PIP, "wheel", "-qq", "-w", place, TESTED_TORCH, requirement])
    wheels = {name_of(path): path for path in place.glob("*.whl")}
    name = DISTRIBUTION if requirement.endswith(".whl") else Requirement(requirement).name
    beside = closure(canonicalize_name(name), wheels)
    sizes = {each: wheels[each].stat().st_size / 1e6 for each in beside}
    largest = sorted(sizes, key=lambda each: -sizes[each])[:3]
    return {
        "version": wheels[canonicalize_name(name)].name.split("-")[1],
        "packages": len(beside),
        "download_mb": sum(sizes.values()),
        "needs_torch": "torch" in closure(canonicalize_name(name), wheels, through_torch=True),
        "largest_mb": {each: round(sizes[each], 1) for each in largest},
    }


def name_of(wheel: Path) -> str:
    return canonicalize_name(wheel.name.split("-")[0])


def closure(name: str, wheels: dict[str, Path], *, through_torch: bool = False) -> set[str]:
    """The wheels that it needs, itself among them, without torch and what only torch needs."""
    found: set[str] = set()
    asked: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    while waiting:
        each = waiting.pop()
        if each in asked or each[0] not in wheels or (each[0] == "torch" and not through_torch):
            continue
        asked.add(each)
        found.add(each[0])
        waiting += needs(wheels[each[0]], each[1])
    return found


def needs(wheel: Path, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    with zipfile.ZipFile(wheel) as files:
        path = next(path for path in files.namelist() if path.endswith(".dist-info/METADATA") and path.count("/") == 1)
        metadata = HeaderParser().parsestr(files.read(path).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    return [
        (canonicalize_name(each.name), frozenset(each.extras))
        for each in requirements
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def installed(wheel: Path, place: Path) -> dict[str, Any]:
    """The stages from an empty directory on, in seconds, and what is then on the disk."""
    environment, seconds = place / "environment", {}
    python = environment / "bin/python"
    for stage, work in {
        "environment": lambda: venv.create(environment, with_pip=True),
        "torch": lambda: call([python, "-m", "pip", "install", "-qq", TESTED_TORCH]),
        "areal": lambda: call([python, "-m", "pip", "install", "-qq", TESTED_TORCH, wheel]),
    }.items():
        began = time.monotonic()
        work()
        seconds[stage] = time.monotonic() - began
    call([python, "-m", "pip", "check"])
    seconds["rising_reward"], rewards = until_rising(environment / "bin/areal", place)
    libraries = next((environment / "lib").glob("python*/site-packages"))
    sizes = {path.name: size_mb(path) for path in libraries.iterdir()}
    return {
        "seconds": {**seconds, "all": sum(seconds.values())},
        "steps": len(rewards),
        "reward": [sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW],
        "disk_mb": sum(sizes.values()),
        "torch_disk_mb": sizes["torch"],
    }


def size_mb(path: Path) -> float:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file()) / 1e6


def until_rising(areal: Path, place: Path) -> tuple[float, list[float]]:
    """Seconds from the command on, and the rewards so far."""
    words = ["train", "--demo", "trial_name=one", "evaluator.freq_steps=null", "evaluator.greedy=false", "quiet=true"]
    # Its models too are made anew, as for somebody who has never run it.
    variables = {**clean_variables(), "AREAL_CACHE": str(place / "cache"), "XDG_CACHE_HOME": str(place / "cache")}
    began = time.monotonic()
    process = subprocess.Popen([areal, *words], cwd=place, env=variables, stdout=sys.stderr)
    try:
        while process.poll() is None and time.monotonic() - began < RUN_SECONDS:
            rewards = rewards_in(place / "runs/sort-digits/one/metrics.jsonl")
            if risen(rewards):
                return time.monotonic() - began, rewards
            try:
                process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        raise RuntimeError(f"the reward has not risen by {RISE} within {RUN_SECONDS:g} s")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def rewards_in(metrics: Path) -> list[float]:
    if not metrics.exists():
        return []
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [each["reward"] for each in map(json.loads, lines) if "reward" in each]


def risen(rewards: Sequence[float]) -> bool:
    """The mean of the latest steps is above that of the first ones, which they do not overlap."""
    return len(rewards) >= 2 * WINDOW and sum(rewards[-WINDOW:]) - sum(rewards[:WINDOW]) >= RISE * WINDOW


def run() -> tuple[dict[str, Any], list[Aim]]:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        wheel = own_wheel(place)
        figures: dict[str, Any] = {"areal": fetched(str(wheel), place / "areal")}
        for peer, requirement in PEERS.items():
            figures[peer] = fetched(requirement, place / peer)
            shutil.rmtree(place / peer)
        figures["areal"] |= installed(wheel, place)
    figures["python"] = ".".join(map(str, sys.version_info[:3]))
    figures["load_average"] = os.getloadavg()[0]
    ours = figures["areal"]
    aims = [
        Aim.at_most("packages besides torch", ours["packages"], MOST_PACKAGES),
        Aim.at_most("packages, in TRL's", ours["packages"] / figures["trl"]["packages"], 1.0),
        Aim.at_most(
            "megabytes to fetch besides torch, in TRL's", ours["download_mb"] / figures["trl"]["download_mb"], 1.0
        ),
        Aim.at_most("seconds from an empty environment to a rising reward", ours["seconds"]["all"], MOST_SECONDS),
    ]
    return figures, aims


if __name__ == "__main__":
    main(__doc__ or "", run)
