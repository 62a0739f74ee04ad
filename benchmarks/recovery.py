"""What 200 kill -9 cost a run, and what its store costs: `python -m benchmarks.recovery --json`.

The runs are short, of an agent that asks twice. Their drivers, engines, rollout workers and keepers are killed:
anywhere in a step, right after a step is committed, while the run starts or recovers, and drivers also while they
train steps again that no checkpoint has, and at three moments of a checkpoint. A driver is started again with the same
command until its run is finished; for the others the run looks after itself.

Afterwards three witnesses must agree: the run store, its exports (metrics.jsonl, rollouts.jsonl), and a file to which
the agents append each episode they have sampled. At each kill it is noted which groups had ended by then, according to
the store. An episode that is sampled a second time is in order only if its group was still running at a kill; tokens of
any other are work thrown away. What of such a group had been sampled before the kill is counted too, without an aim.

The cost of the store is measured on examples/agent_workflow: the share of a step's time for which it waits until it is
committed. What the thread that writes computes meanwhile, beside the trainer, is told as a share of the processor time
of all processes.

The seed decides who is killed and when; what that meets depends on the machine too. `--quick` is for tests.
"""

import argparse
import math
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from areal.store.schema import READY, REJECTED, STORE_FILE, TRAINED, StoreError, open_for_reading
from areal.trainer.checkpoint import DamagedCheckpoint, check_files, checkpoint_digest
from benchmarks.attacked import MOMENTS
from benchmarks.attacked_run import (
    BATCH,
    CONFIG,
    ENGINE,
    KEEPER,
    MAX_FAILED_RUNS,
    SAMPLES,
    WORKER,
    AttackedRun,
    Damage,
    go_on,
    note_end,
    progress,
    read_lines,
)
from benchmarks.report import Aim, main

DRIVER = "driver"
VICTIMS = {DRIVER: 20, ENGINE: 25, WORKER: 30, KEEPER: 25}
"""Who is killed, and how often of a hundred times; a driver that kills itself comes on top."""
IN_STEP, AT_COMMIT, AT_ONCE = "in a step", "at a commit", "while it recovers"
MOMENTS_OF_ALL = {IN_STEP: 45, AT_COMMIT: 25, AT_ONCE: 30}
"""When: some time after a step, right after one is committed, or some time after the last kill."""
ARMED = 0.4
"""The share of resumed drivers that will kill themselves, at one of `MOMENTS`."""
MOST_WAIT_SECONDS = 1.5
"""Before a kill in a step or after another."""
LOOK_SECONDS = 0.01
"""How often it is looked whether a step is committed."""
KILLS_PER_RUN = 20
"""Then it is left to end."""
COST_SECONDS = 1200.0
"""How long the example may take."""
MOST_STORE_SHARE = 0.02
OTHER_WEIGHTS = "gives other weights than it gave"
"""How a run says that."""
ENDED = (READY, TRAINED, REJECTED)
"""The states of groups that need not be sampled again."""
STALENESS = (0, 2)
"""How far runs may be off-policy."""


@dataclass(frozen=True)
class Counts:
    kills: int = 200
    minutes: float = math.inf
    """For the kills; then there are fewer."""
    steps: int = 16
    """Of each run whose processes are killed."""
    cost_steps: int = 60
    """Of each run of the example."""
    cost_runs: int = 3


QUICK = Counts(kills=4, steps=4, cost_steps=3, cost_runs=1)


@dataclass
class Losses(Damage):
    """What kills have cost."""

    missing_steps: int = 0
    steps_taken_back: int = 0
    steps_with_other_weights: int = 0
    """When a resumed run trained them again from what was stored."""
    rejected_groups: int = 0
    """The agents never fail by themselves."""
    thrown_away_tokens: int = 0
    """Of episodes that were sampled again although their group had ended, or although nothing was killed."""
    altered_groups: int = 0
    """What was stored of them is not what was sampled."""
    stale_episodes: int = 0
    """Trained although they were older than allowed."""
    versions_back: int = 0
    damaged_checkpoints: int = 0
    sampled_tokens: int = 0
    interrupted_tokens: int = 0
    """Of episodes that had ended, in groups that were running at a kill."""
    seconds_to_resume: list[float] = field(default_factory=list)
    """From the command of a killed driver to the commit of the next step."""
    seconds_to_next_step: list[float] = field(default_factory=list)
    """The same from the kill of another process."""


# ------------------------------------------------------------------------------------------------------- the kills


@dataclass(frozen=True)
class Kill:
    at: float
    victim: str
    moment: str
    ended: frozenset[int]
    """The tasks whose groups had ended by then, according to the store."""


class KilledRun(AttackedRun):
    def __init__(self, place: Path, steps: int, *settings: str) -> None:
        self.kills: list[Kill] = []
        self.starts: list[float] = []
        super().__init__(place, steps, "benchmarks.attacked.TwoTurns", *settings)

    def start(self, moment: str = "") -> None:
        self.moment = moment
        self.starts.append(time.time())
        super().start(moment)

    def kill(self, victim: str, moment: str, draw: random.Random) -> bool:
        """False if there is no such process at the moment: it is being started."""
        pids = [self.driver.pid] if victim == DRIVER else self._pids(victim)
        if not pids:
            return False
        pid = draw.choice(pids)
        self.attacked.update(_children(pid) if victim == KEEPER else ())
        at = time.time()
        self.attack(pid, signal.SIGKILL)
        if victim == DRIVER:
            self.driver.wait()
        self.note_kill(victim, moment, at)
        return True

    def note_kill(self, victim: str, moment: str, at: float) -> None:
        self.kills.append(Kill(at, victim, moment, frozenset(self._ended_groups())))

    def sampled_episodes(self) -> list[dict[str, Any]]:
        return read_lines(self.sampled)

    def was_interrupted(self, task: int, began: float, again: float) -> bool:
        """Whether the task's group was running at a kill between these times, and had not ended at any before."""
        between = any(began <= kill.at <= again for kill in self.kills)
        return between and not any(task in kill.ended for kill in self.kills if kill.at <= again)

    def steps_recorded(self) -> int:
        """Those that are committed."""
        with self.store() as db:
            return 0 if db is None else int(db.execute("SELECT count(*) FROM steps").fetchone()[0])

    @contextmanager
    def store(self) -> Iterator[sqlite3.Connection | None]:
        """None while it is not made yet."""
        try:
            db = open_for_reading(self.directory / STORE_FILE)
        except StoreError:
            yield None
        else:
            with closing(db):
                yield db

    def _pids(self, module: str) -> list[int]:
        """Without the keeper that has no command: it is there for the moment in which the driver is killed."""
        found = self.processes().items()
        return sorted(pid for pid, command in found if module in command and not command.endswith(" hold "))

    def _ended_groups(self) -> list[int]:
        with self.store() as db:
            return [] if db is None else [task for task, each in states_of(db).items() if each in ENDED]


def _children(pid: int) -> set[int]:
    with suppress(OSError):
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()


def kill_processes(counts: Counts, seed: int, place: Path) -> Losses:
    """Runs under fire, one after another, until there were enough kills. All must end as if nothing had happened."""
    draw, losses, began = random.Random(seed), Losses(), time.monotonic()
    until = began + counts.minutes * 60
    while (left := counts.kills - losses.attacks.total()) > 0 and time.monotonic() < until:
        if losses.failed_runs + losses.hangs >= MAX_FAILED_RUNS:
            break
        staleness = draw.choice(STALENESS)
        with KilledRun(
            place / f"run-{losses.runs}",
            counts.steps,
            f"seed={draw.randrange(1000)}",
            f"rollout.max_head_offpolicyness={staleness}",
            "rollout.num_workers=2",
        ) as run:
            code = None
            with suppress(TimeoutError):
                code = kill_often(run, draw, min(KILLS_PER_RUN, left), until, losses)
            losses.attacks.update(f"{kill.victim}, {kill.moment}" for kill in run.kills)
            harmed = examine(run, code, staleness, losses)
        if not harmed:
            shutil.rmtree(run.place)
        losses.seconds = time.monotonic() - began
        progress(f"kills: {losses.attacks.total()} of {counts.kills} in {losses.runs} runs ({losses.seconds:.0f} s)")
    return losses


def kill_often(run: KilledRun, draw: random.Random, count: int, until: float, losses: Losses) -> int:
    """Kill processes of the run, so many or until that time, then let it end; its exit code.

    Raises TimeoutError if it hangs.
    """
    while True:
        enough = len(run.kills) >= count or time.monotonic() > until
        victim = draw.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        moment = draw.choices(list(MOMENTS_OF_ALL), list(MOMENTS_OF_ALL.values()))[0]
        code = run.wait_to_end() if enough else _wait_for(run, moment, draw)
        if code == -signal.SIGKILL:
            run.note_kill(DRIVER, run.moment, time.time())
        elif code is not None:
            return code
        elif not run.kill(victim, moment, draw) or victim != DRIVER:
            continue
        armed = not enough and draw.random() < ARMED
        go_on(run, losses, draw.choice(MOMENTS) if armed else "")


def _wait_for(run: KilledRun, moment: str, draw: random.Random) -> int | None:
    """The exit code if the run ends before that."""
    code = None
    if moment != AT_ONCE:
        seen = run.steps_recorded()
        code = run.wait_until(lambda: run.steps_recorded() > seen, LOOK_SECONDS)
    if code is None and moment != AT_COMMIT:
        code = run.wait(draw.uniform(0, MOST_WAIT_SECONDS))
    return code


# -------------------------------------------------------------------------------------------------- the witnesses


def examine(run: KilledRun, code: int | None, staleness: int, losses: Losses) -> bool:
    """Add to `losses` what the witnesses say once the run has ended with an exit code (None = it hangs).

    True if anything is not as it should be.
    """
    before = harm_of(losses)
    note_end(run, code, losses)
    with run.store() as db:
        if db is None:
            progress("there is no run store")
            losses.missing_steps += run.steps
        else:
            for check in (check_steps, check_groups, check_work, check_versions, check_checkpoints):
                for finding in check(run, db, losses):
                    progress(f"{run.place.name}: {finding}")
            stale = db.execute("SELECT count(*) FROM episodes WHERE staleness > ?", (staleness,)).fetchone()[0]
            losses.stale_episodes += stale
            losses.steps_with_other_weights += " ".join(run.output.split()).count(OTHER_WEIGHTS)
            measure_recovery(run, db, losses)
    return harm_of(losses) != before


def check_steps(run: KilledRun, db: sqlite3.Connection, losses: Losses) -> Iterator[str]:
    """Each is once in the store and in its exports."""
    stored = Counter(step for (step,) in db.execute("SELECT step FROM steps"))
    lines = Counter(row["step"] for row in run.lines("metrics.jsonl") if "reward" in row)
    trained = {row["step"] for row in run.lines("rollouts.jsonl")}
    expected = range(1, run.steps + 1)
    missing = [step for step in expected if not (stored[step] and lines[step] and step in trained)]
    repeated = [step for step, times in lines.items() if times > 1]
    beyond = sorted({*stored, *lines, *trained} - {0, *expected})
    losses.missing_steps += len(missing)
    losses.doubled_groups += BATCH * len([*repeated, *beyond])
    if missing or repeated or beyond:
        yield f"steps missing {missing}, twice {repeated}, too many {beyond}"


def check_groups(run: KilledRun, db: sqlite3.Connection, losses: Losses) -> Iterator[str]:
    """Each task of the run's order was trained in one step, whole, and nothing else was."""
    states, steps = states_of(db), dict(db.execute("SELECT task_id, step FROM groups").fetchall())
    rejected = [task for task, state in states.items() if state == REJECTED]
    exported: dict[int, list[int]] = {}
    for row in run.lines("rollouts.jsonl"):
        exported.setdefault(row["task_id"], []).append(row["step"])
    of_step = Counter(steps[task] for task, state in states.items() if state == TRAINED)
    doubled = [task for task, each in exported.items() if len(set(each)) > 1 or len(each) > SAMPLES]
    overfull = [step for step, groups in of_step.items() if groups > BATCH]
    # A group that is rejected makes room for one more task, so the tasks of a run are known.
    expected = [task for task in range(run.steps * BATCH + len(rejected)) if task not in rejected]
    lost = [
        task
        for task in expected
        if states.get(task) != TRAINED or len(exported.get(task, [])) < SAMPLES or steps[task] not in exported[task]
    ]
    losses.doubled_groups += len(doubled) + len(overfull)
    losses.lost_groups += len(lost)
    losses.rejected_groups += len(rejected)
    if doubled or overfull or lost or rejected:
        yield f"groups twice {doubled}, lost {lost}, rejected {rejected}; steps with too many {overfull}"


def check_work(run: KilledRun, db: sqlite3.Connection, losses: Losses) -> Iterator[str]:
    """What was sampled is what was stored, and was sampled again only if its group was running at a kill."""
    lines = run.sampled_episodes()
    losses.sampled_tokens += sum(line["tokens"] for line in lines)
    episodes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["began"]):
        episodes.setdefault((line["task"], line["seed"]), []).append(line)
    thrown_away: Counter[int] = Counter()
    for (task, _), each in episodes.items():
        for earlier, later in pairwise(each):
            if run.was_interrupted(task, earlier["began"], later["began"]):
                losses.interrupted_tokens += earlier["tokens"]
            else:
                thrown_away[task] += earlier["tokens"]
    losses.thrown_away_tokens += thrown_away.total()
    if thrown_away:
        yield f"tokens of finished groups that were thrown away, by task: {dict(thrown_away)}"
    kept: dict[int, Counter[int]] = {}
    for task, tokens in db.execute("SELECT task_id, tokens FROM episodes"):
        kept.setdefault(task, Counter())[tokens] += 1
    sampled: dict[int, Counter[int]] = {}
    for (task, _), each in episodes.items():
        sampled.setdefault(task, Counter())[each[-1]["tokens"]] += 1
    altered = [task for task, tokens in kept.items() if tokens - sampled.get(task, Counter())]
    losses.altered_groups += len(altered)
    if altered:
        yield f"groups stored with other tokens than were sampled: {altered}"


def check_versions(run: KilledRun, db: sqlite3.Connection, losses: Losses) -> Iterator[str]:
    """They only grow, and each session begins with the last step that was committed before it."""
    steps = db.execute("SELECT step, version, at FROM steps ORDER BY step").fetchall()
    published = [
        orjson.loads(detail)["version"]
        for (detail,) in db.execute("SELECT detail FROM events WHERE kind = 'published' ORDER BY id")
    ]
    back = _descents(version for _, version, _ in steps) + _descents(at for _, _, at in steps) + _descents(published)
    losses.versions_back += back
    if back:
        yield f"versions or times go back: {[tuple(step) for step in steps]}, published {published}"
    for began, first_step in db.execute("SELECT began, first_step FROM sessions ORDER BY id"):
        taken = max((step for step, _, at in steps if at < began), default=0)
        losses.steps_taken_back += max(0, taken - first_step)
        if taken != first_step:
            yield f"a session began with step {first_step}, {taken} were committed"


def _descents(values: Iterable[float]) -> int:
    return sum(later < earlier for earlier, later in pairwise(values))


def check_checkpoints(run: KilledRun, db: sqlite3.Connection, losses: Losses) -> Iterator[str]:
    """Those on the disk are whole and known to the store, the last step's among them; nothing partial is left."""
    known = dict(db.execute("SELECT name, digest FROM checkpoints").fetchall())
    found = {path.name: path for path in (run.directory / "checkpoints").iterdir()}
    last = f"step-{run.steps:06d}"
    damaged = {name: why for name, path in found.items() if (why := _damage(path, known.get(name)))}
    if last not in found:
        damaged[last] = "it is missing"
    losses.damaged_checkpoints += len(damaged)
    if damaged:
        yield f"checkpoints: {damaged}"


def _damage(directory: Path, digest: str | None) -> str:
    """What is wrong with a checkpoint; empty = nothing."""
    if digest is None:
        return "the store does not know it"
    try:
        check_files(directory)
    except DamagedCheckpoint as damage:
        return str(damage)
    return "" if checkpoint_digest(directory) == digest else "the store knows another"


def measure_recovery(run: KilledRun, db: sqlite3.Connection, losses: Losses) -> None:
    """From each start, and each kill of another process, to the next step, unless there was another kill before."""
    committed = sorted(at for (at,) in db.execute("SELECT at FROM steps"))
    kills = sorted(kill.at for kill in run.kills)
    others = [kill.at for kill in run.kills if kill.victim != DRIVER]
    for moments, seconds in ((run.starts[1:], losses.seconds_to_resume), (others, losses.seconds_to_next_step)):
        for moment in moments:
            step = next((at for at in committed if at > moment), None)
            if step is not None and not any(moment < kill < step for kill in kills):
                seconds.append(step - moment)


def states_of(db: sqlite3.Connection) -> dict[int, str]:
    return dict(db.execute("SELECT task_id, state FROM groups").fetchall())


# ----------------------------------------------------------------------------------------------- the cost of a store


def measure_store(steps: int, runs: int, place: Path) -> dict[str, float]:
    """What writing everything down costs the example: medians over some runs of it."""
    found = [_measured_run(steps, place / str(number)) for number in range(runs)]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def _measured_run(steps: int, place: Path) -> dict[str, float]:
    words = ["train", "--config", str(CONFIG), f"output_dir={place}", "trial_name=one", f"total_train_steps={steps}"]
    words += ["evaluator.freq_steps=null", "evaluator.greedy=false", "valid_dataset.size=16"]
    argv = [sys.executable, "-m", "areal.cli.main", *words]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COST_SECONDS)
    if ended.returncode != 0:
        raise RuntimeError(f"the example ended with code {ended.returncode}:\n{ended.stdout.decode()[-2000:]}")
    directory = place / "sort-digits" / "one"
    lines = [row for row in read_lines(directory / "metrics.jsonl") if "reward" in row]
    summary = orjson.loads((directory / "summary.json").read_bytes())
    store = summary["store"]
    took, waited, tokens, episodes = (
        sum(row[name] for row in lines) for name in ("step_seconds", "store_seconds", "tokens", "episodes")
    )
    return {
        "steps": len(lines),
        "seconds_per_step": statistics.median(row["step_seconds"] for row in lines),
        "share_of_step_time": waited / took,
        "share_of_processor_time": store["cpu_seconds"] / sum(summary["cpu_seconds"].values()),
        "writer_microseconds_per_episode": 1e6 * store["cpu_seconds"] / episodes,
        "bytes_per_token": store["bytes"] / tokens,
        "bytes_per_episode": store["bytes"] / episodes,
    }


# ------------------------------------------------------------------------------------------------------- all of it

HARM = {
    "lost_groups": "groups lost",
    "doubled_groups": "groups trained twice",
    "missing_steps": "steps missing",
    "steps_taken_back": "steps taken back",
    "steps_with_other_weights": "resumed runs that came to other weights",
    "thrown_away_tokens": "tokens of finished groups thrown away",
    "rejected_groups": "groups rejected",
    "altered_groups": "groups stored with other tokens than were sampled",
    "stale_episodes": "episodes trained although too old",
    "versions_back": "versions that went back",
    "damaged_checkpoints": "checkpoints damaged, partial or unknown to the store",
    "hangs": "hangs",
    "failed_runs": "runs that failed",
    "engine_deaths": "deaths of engines that no one killed",
    "worker_deaths": "deaths of workers that no one killed",
    "orphans": "processes left",
    "leaked_shared_memory": "shared memory left",
    "leaked_directories": "temporary directories left",
}
"""What the witnesses may find, and what it is called in the report. Every aim is 0."""


def harm_of(losses: Losses) -> dict[str, int]:
    return {name: getattr(losses, name) for name in HARM}


def run(seed: int, counts: Counts, keep: Path | None = None) -> tuple[dict[str, Any], list[Aim]]:
    """`keep`: a directory in which runs that were harmed stay."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
        place = keep or Path(temporary)
        losses = kill_processes(counts, seed, place / "kills")
        cost = measure_store(counts.cost_steps, counts.cost_runs, place / "example")
    resume, next_step = losses.seconds_to_resume, losses.seconds_to_next_step
    figures = {
        "seed": seed,
        "kills": {**vars(losses), "seconds_to_resume": spread(resume), "seconds_to_next_step": spread(next_step)},
        "store": cost,
    }
    return figures, [
        Aim.at_least("kills", losses.attacks.total(), counts.kills),
        *(Aim.at_most(HARM[name], value, 0) for name, value in harm_of(losses).items()),
        Aim.at_most("share of step time that waits for the store", cost["share_of_step_time"], MOST_STORE_SHARE),
    ]


def spread(seconds: list[float]) -> dict[str, float]:
    return {"count": len(seconds), "median": statistics.median(seconds), "max": max(seconds)} if seconds else {}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="decides the kills (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=Counts.kills, help="how many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=Counts.minutes, help="for the kills (default: no limit)")
    parser.add_argument("--keep", type=Path, help="an empty directory, in which runs that were harmed stay")
    parser.add_argument("--quick", action="store_true", help="a few kills, to check that all of it runs")
    return parser


if __name__ == "__main__":
    parser = options()
    asked = parser.parse_known_args()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its runs end too
    counts = QUICK if asked.quick else Counts(kills=asked.kills, minutes=asked.minutes)
    main(__doc__ or "", lambda: run(asked.seed, counts, asked.keep), parser)
