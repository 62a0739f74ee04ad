"""One YAML on every scheduler and engine that this machine can have: `python -m benchmarks.combinations --json`.

The example agent trains for five steps on each. Only `scheduler` and the backend's own settings change between two
runs. Slurm and Ray are real and have two hosts in namespaces (`benchmarks.clusters`); with Slurm the driver runs on the
login node, with Ray on the head. `addresses` is an engine server that was started by hand on the driver's host.

Of each run is checked: every task and sample was trained once; rewards are those of the task, and both occur; an
episode of step N was sampled with the weights that step N - 1 left; the log-probs that came with the tokens are those
that the trainer computes for these very token ids; and engines of this package give the same answers to the first
step's tasks everywhere. What cannot run here is listed with the reason.
"""

import argparse
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from areal.engine.models import find_model
from benchmarks.clusters import (
    LOGIN,
    Hosts,
    RayCluster,
    SlurmCluster,
    command_line,
    missing_programs,
    parent_of,
    why_no_hosts,
)
from benchmarks.report import Aim, main

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/agent_workflow"
MODEL = "builtin:tiny-math"
RUN = "runs/combinations/one"
"""Where a run leaves what it did."""
SCHEDULERS = ("local", "slurm", "ray")
ADDRESSES = "addresses"
"""In place of a backend: `rollout.addresses`."""
BACKENDS = ("embedded", "embedded:d2", ADDRESSES, "vllm", "vllm:d2")
STEPS, TASKS, SAMPLES = 5, 4, 4
RUN_SECONDS = {"embedded": 300.0, "vllm": 1200.0}
"""vLLM on a CPU takes minutes to start."""
LOOK_SECONDS = 0.2
LOG_CHARACTERS = 3000
MODULES = ("-m areal.rollout.worker", "-m areal.engine.inference.server")
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
CHANGES: dict[str, Any] = {
    "experiment_name": "combinations",
    "trial_name": "one",
    "total_train_steps": STEPS,
    "actor": {"kl_ctl": 1.0e-3},  # then the log-probs of every token are compared
    "ref": {"path": MODEL},
    "gconfig": {"n_samples": SAMPLES},
    "rollout": {"max_head_offpolicyness": 0, "num_workers": 2, "cpus": 1},
    "train_dataset": {"batch_size": TASKS},
    "valid_dataset": {"path": ""},
    "evaluator": {"freq_steps": None},
    "saver": {"freq_steps": None},
}
"""To the example's YAML, for all combinations alike."""


@dataclass(frozen=True)
class Place:
    """Where the driver of a run is started, and the settings that its scheduler needs."""

    settings: Sequence[str]
    address: str
    """Of the driver's host, which other hosts reach."""
    inside: Callable[..., list[str]] = lambda *argv: list(argv)
    """A command line that runs there."""
    env: dict[str, str] = field(default_factory=dict)
    hosts: Hosts | None = None


@dataclass
class Outcome:
    scheduler: str
    backend: str
    result: str
    """`passed`, `failed` or `left out`."""
    reason: str = ""
    seconds: float | None = None
    """Of the whole command."""
    episodes_per_second: float | None = None
    """Without starting and ending the processes."""
    versions: str = ""
    max_logprob_difference: float | None = None
    same_answers: float | None = None
    """Share of all episodes whose answers are those of the first combination."""
    processes: dict[str, int] = field(default_factory=dict)
    """Engines and workers on each host."""


@contextmanager
def on_this_machine() -> Iterator[Place]:
    yield Place(["scheduler.type=local"], "127.0.0.1")


@contextmanager
def on_slurm() -> Iterator[Place]:
    hosts = Hosts(2)
    with ExitStack() as stack:
        # Not in /tmp, of which each host has its own, and by a short name, since there are sockets in it.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-slurm-", dir="/var/tmp")))
        directory.chmod(0o755)
        stack.callback(hosts.down)
        hosts.up()
        cluster = SlurmCluster(directory, hosts)
        stack.callback(cluster.down)
        cluster.up()
        yield Place(["scheduler.type=slurm", "scheduler.nodes=2"], LOGIN, env=cluster.env, hosts=hosts)


@contextmanager
def on_ray() -> Iterator[Place]:
    hosts = Hosts(2)
    with ExitStack() as stack:
        stack.callback(hosts.down)
        hosts.up()
        cluster = RayCluster(hosts, cpus=2)  # with two engines no host has room for the workers too
        cluster.up()
        settings = ["scheduler.type=ray", f"scheduler.ray_address={cluster.address}"]
        yield Place(settings, hosts.address(cluster.head), partial(hosts.inside, cluster.head), cluster.env, hosts)


PLACES = {"local": on_this_machine, "slurm": on_slurm, "ray": on_ray}


def why_not(scheduler: str, backend: str) -> str:
    """Why a combination cannot run here; empty = it can."""
    if scheduler != "local" and (why := why_no_hosts()) is not None:
        return why
    if scheduler == "slurm" and (missing := missing_programs()):
        return f"there is no {', '.join(missing)}"
    if scheduler == "ray" and importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    if backend.startswith("vllm") and not VLLM_PYTHON.exists():
        return f"vLLM is not installed in {VLLM_PYTHON.parents[1].name}"
    return ""


@contextmanager
def backend_settings(backend: str, place: Place, secret: Path) -> Iterator[list[str]]:
    """`secret`: a file in which a server's secret may be left."""
    if backend == ADDRESSES:
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        with engine_server(place, secret) as address:
            yield [f"rollout.addresses=[{address}]", f"rollout.secret_file={secret}"]
    elif backend.startswith("vllm"):
        yield [
            f"rollout.backend={backend}",
            f"rollout.python={VLLM_PYTHON}",
            "rollout.engine_args=[--enforce-eager]",
        ]
    else:
        yield [f"rollout.backend={backend}"]


@contextmanager
def engine_server(place: Place, secret: Path) -> Iterator[str]:
    """An engine that was started by hand; yields where it serves."""
    argv = [sys.executable, "-m", "areal.engine.inference.server", str(find_model(MODEL))]
    argv += ["--listen", f"tcp:{place.address}:0", "--secret-file", str(secret)]
    log = secret.with_name("server.log")
    with log.open("wb") as file:
        server = subprocess.Popen(
            place.inside(*argv), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        says, deadline = "the engine serves at ", time.monotonic() + RUN_SECONDS["embedded"]
        while says not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine server does not serve: {log.read_text()[-400:]}")
            time.sleep(LOOK_SECONDS)
        yield log.read_text().partition(says)[2].split()[0]
    finally:
        server.terminate()
        server.wait(RUN_SECONDS["embedded"])


def train(config: Path, place: Place, outcome: Outcome, directory: Path) -> Outcome:
    """One run of the example. A reason says that it failed."""
    seconds = RUN_SECONDS["vllm" if outcome.backend.startswith("vllm") else "embedded"]
    log = directory / "driver.log"
    try:
        with backend_settings(outcome.backend, place, directory / "secret") as settings, log.open("wb") as file:
            argv = [sys.executable, str(EXAMPLE / "train.py"), "--config", str(config), *place.settings, *settings]
            argv += [f"output_dir={directory / 'runs'}"]
            began = time.monotonic()
            driver = subprocess.Popen(
                place.inside(*argv), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **place.env}
            )
            try:
                while driver.poll() is None and time.monotonic() - began < seconds:
                    outcome.processes = _most(outcome.processes, _processes(place))
                    time.sleep(LOOK_SECONDS)
            finally:
                if driver.poll() is None:
                    outcome.reason = f"it did not end within {seconds:g} s"
                    driver.terminate()
                    driver.wait(60)
            outcome.seconds = round(time.monotonic() - began, 1)
    except RuntimeError as error:
        outcome.reason = str(error)
        return outcome
    if driver.returncode:
        outcome.reason = outcome.reason or f"code {driver.returncode}"
    if outcome.reason:
        print(f"failed; the end of its log is\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}", file=sys.stderr)
    return outcome


def examine(outcome: Outcome, run_dir: Path, first: dict[tuple[int, int], list[str]]) -> None:
    """Look at what a run left; `first` are the answers of the first combination, by step and task."""
    steps = [row["step"] for row in _rows(run_dir / "metrics.jsonl") if "loss" in row]
    rollouts = _rows(run_dir / "rollouts.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())
    outcome.episodes_per_second = round(len(rollouts) / summary["seconds"], 2)
    versions = [row[key] for row in rollouts for key in ("version_min", "version_max")]
    outcome.versions = f"{min(versions)}–{max(versions)}"
    outcome.max_logprob_difference = summary["max_logprob_difference"]
    answers = answers_of(rollouts)
    first = first or answers
    same = Counter((key, each) for key, said in answers.items() for each in said) & Counter(
        (key, each) for key, said in first.items() for each in said
    )
    outcome.same_answers = round(same.total() / len(rollouts), 3)
    expected = Counter(dict.fromkeys(answers, SAMPLES))
    wrong = {
        "steps": steps != list(range(1, STEPS + 1)),
        "groups": len(answers) != STEPS * TASKS or Counter({k: len(v) for k, v in answers.items()}) != expected,
        "rewards": {row["reward"] for row in rollouts} != {0.0, 1.0},
        "versions": any(not row["version_min"] == row["version_max"] == row["step"] - 1 for row in rollouts),
        "log-probs of the token ids": not (outcome.max_logprob_difference or 1.0) < 1e-4,
        "a process was started again": "started again" in (run_dir.parents[2] / "driver.log").read_text(),
        "tokens": any(row["tokens"] < 1 for row in rollouts),
        "answers of the first step": not outcome.backend.startswith("vllm")
        and any(answers[key] != first.get(key) for key in answers if key[0] == 1),
    }
    outcome.reason = ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
    outcome.result = "failed" if outcome.reason else "passed"


def answers_of(rollouts: list[dict[str, Any]]) -> dict[tuple[int, int], list[str]]:
    """What the samples of each step's tasks said, in any order."""
    answers: dict[tuple[int, int], list[str]] = {}
    for row in rollouts:
        answers.setdefault((row["step"], row["task_id"]), []).append(json.dumps(row["messages"]))
    return {key: sorted(said) for key, said in answers.items()}


def run(schedulers: Sequence[str], backends: Sequence[str]) -> tuple[dict[str, Any], list[Aim]]:
    outcomes: list[Outcome] = []
    first: dict[tuple[int, int], list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="areal-", dir="/var/tmp") as directory:  # where all hosts see it
        config = Path(directory) / "config.yaml"
        config.write_text(yaml.safe_dump(_merged(yaml.safe_load((EXAMPLE / "config.yaml").read_text()), CHANGES)))
        find_model(MODEL)  # made on first use, which is no part of a run
        groups = [[each for each in backends if each.startswith("vllm") is vllm] for vllm in (False, True)]
        for scheduler, group in ((scheduler, group) for group in groups for scheduler in schedulers):
            with ExitStack() as stack:
                place: Place | None = None
                for backend in group:
                    print(f"{scheduler} × {backend} …", end=" ", file=sys.stderr, flush=True)
                    if why := why_not(scheduler, backend):
                        outcome = Outcome(scheduler, backend, "left out", why)
                    else:
                        place = place or stack.enter_context(PLACES[scheduler]())
                        where = Path(directory) / f"{scheduler}-{backend.replace(':', '-')}"
                        where.mkdir()
                        outcome = train(config, place, Outcome(scheduler, backend, "failed"), where)
                        if not outcome.reason:
                            examine(outcome, where / RUN, first)
                            first = first or answers_of(_rows(where / RUN / "rollouts.jsonl"))
                    took = "" if outcome.seconds is None else f" in {outcome.seconds:.0f} s"
                    print(outcome.result + took, outcome.reason, file=sys.stderr, flush=True)
                    outcomes.append(outcome)
    print(table(outcomes), file=sys.stderr)
    ran = [each for each in outcomes if each.result != "left out"]
    failed = [f"{each.scheduler} × {each.backend}" for each in ran if each.result == "failed"]
    aims = [
        Aim.at_least("combinations that ran", len(ran), 1),
        Aim.at_most("combinations that failed", len(failed), 0),
    ]
    return {"steps": STEPS, "episodes": STEPS * TASKS * SAMPLES, "outcomes": [asdict(each) for each in outcomes]}, aims


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown."""
    titles = ["scheduler", "backend", "engines and workers", "seconds", "episodes/s", "versions", "log-probs differ by"]
    titles += ["same answers", "result"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for each in outcomes:
        where = ", ".join(f"{host} {count}" for host, count in each.processes.items())
        seconds = "" if each.seconds is None else f"{each.seconds:.0f}"
        pace = "" if each.episodes_per_second is None else f"{each.episodes_per_second:.1f}"
        difference = "" if each.max_logprob_difference is None else f"{each.max_logprob_difference:.0e}"
        same = "" if each.same_answers is None else f"{each.same_answers:.0%}"
        result = f"{each.result}: {each.reason}" if each.reason else each.result
        cells = (each.scheduler, each.backend, where, seconds, pace, each.versions, difference, same, result)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _processes(place: Place) -> dict[str, int]:
    """How many engines and workers each host has now."""
    if place.hosts is None:
        return {}
    counts = {}
    for name in place.hosts.names:
        found = {pid for pid in place.hosts.processes(name) if any(each in command_line(pid) for each in MODULES)}
        # A child that has not begun its own program yet looks like its parent.
        counts[name] = sum(parent_of(pid) not in found for pid in found)
    return counts


def _most(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {name: max(count, before.get(name, 0)) for name, count in now.items()}


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**settings, **changes}
    for name, value in changes.items():
        if isinstance(value, dict):
            both[name] = {**settings.get(name, {}), **value}
    return both


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedulers", nargs="+", default=SCHEDULERS, choices=SCHEDULERS)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    options, _ = parser.parse_known_args()
    main(__doc__ or "", partial(run, options.schedulers, options.backends), parser)
